"""An answer must state the value of the ground truth, in its form; whoever copies the problem
states none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.rewards.math.formula_equality import is_number
from distflow.rewards.math.reward import compute_score

# ground truth ## a box that does not state it, though a parser may find the same value in it
NOT_STATED = r"""
7 ## 7 \approx 8
7 ## 8=7
7 ## 7'
7 ## 7\text{nope}
7 ## 7 \text{ nope}
7 ## 7 \pm 0
7 ## 7 or 8
7 ## 6+1
7 ## 7, 8
7 ## \neq 7
7 ## 7 \to 8
7 ## x=7=8
7 ## 7!
7 ## \sqrt{49}
7 ## [7,7]
7 ## (6,8)
7 ## x<7
7 ## x \le 7
7 ## 7^1
7 ## 7 \cdot 1
7 ## 7+0
7 ## |7|
7 ## |-7|
7 ## \lfloor 7.5 \rfloor
7 ## 2^3-1
7 ## \log_2 128
7 ## \sum_{k=1}^{7} 1
7 ## \binom{7}{1}
7 ## \gcd(7,14)
7 ## -(-7)
7 ## --7
7 ## 7 \neq 8
7 ## 7 = 8
7 ## 7 \ne 7
7 ## 7 \Rightarrow 8
7 ## 7 \text{ or } 8
7 ## 14 \div 2
7 ## 8 - 1
7 ## \frac{6+1}{1}
7 ## \max(7,3)
7 ## 7 \text{ is wrong}
7 ## 7 \cup 8
7 ## 7?8
7 ## 7 wrong
7 ## not 7
7 ## \text{not } 7
7 ## 7 \text{ never}
7 ## 7 \ldots
7 ## 7...8
7 ## 7-8
7 ## 7/8
7 ## 7 \sim 8
7 ## 7 \equiv 8
7 ## 7 \mid 8
7 ## 14:2
7 ## 7;8
7 ## 7 8
7 ## 7|8
7 ## 7''
7 ## 7^\circ x
7 ## 7x
7 ## 7i
7 ## 7\pi
7 ## x \neq 7
7 ## 7 \le 7
7 ## 7 \ge x
7 ## \int_0^7 dx
7 ## f(7)
7 ## 17 \mod 10
7 ## 17 \pmod{10}
7 ## \det(7)
7 ## 7 \text{ cm} = 8 \text{ cm}
7 ## x = 7 \text{ or } 8
7 ## y=7, x=8
7 ## \sqrt[3]{343}
7 ## 7 \circ 8
7 ## 7*1
7 ## seven eight
7 ## \frac{49}{\sqrt{49}}
7 ## \overline{7}
7 ## \mathbf{7}+0
7 ## 7=x=8
7 ## 8=x=7
7 ## 7 \approx 7.6
7 ## \approx 8 = 7
7 ## 7 \rightarrow 7
7 ## \text{7 or 8}
7 ## 7 & 8
7 ## 7 \\ 8
7 ## 7 \text{ sometimes}
7 ## 7 \text{ perhaps}
7 ## 7^{1}
7 ## 7**1
7 ## \left|7\right|
7 ## \lim_{x\to 7} x
7 ## 7 + 0i
7 ## 7 e^0
7 ## \Re(7)
7 ## \sin 7
7 ## 7 < 8
7 ## 7 \in \{7,8\}
7 ## \{7,8\}
7 ## x \in \{7,8\}
7 ## 7\boxed{8}
7 ## 7.0.0
7 ## 7,0
7 ## 0.07 = 7\%
7 ## \$7 + \$0
7 ## 7 \text{ cm} + 0 \text{ cm}
7 ## x \in 7
7 ## 7 = 7 = 8
7 ## 7 \approx
7 ## 7 =
7 ## = 7 = 8
7 ## 7 \cdot
7 ## 7 +
7 ## 7 -
7 ## + 7 8
7 ## 7\,?
7 ## 7 \text{ out of } 8
7 ## 7^\circ C + 0
7 ## 7 \text{ to } 8
7 ## 7 \text{ and } 8
7 ## 7 and 8
7 ## 7/7*7
7 ## 7 \div 1
7 ## \frac{7}{1}+0
7 ## \frac{7.0}{0.5+0.5}
7 ## 7 (1)
7 ## (7)(1)
7 ## 7(1)
7 ## 7[1]
7 ## [7]+0
7 ## \{7\} \cup \{8\}
7 ## \{7\}\cup\{7\}
7 ## 7\cup 7
7 ## \lceil 6.5 \rceil
7 ## \text{floor}(7.2)
7 ## floor(7.2)
7 ## round(7.2)
7 ## max(7,3)
7 ## int(7.9)
7 ## 3 choose 2
7 ## \operatorname{lcm}(7,1)
7 ## \gcd(14,21)
7 ## 7 \oplus 0
7 ## \begin{pmatrix}7\end{pmatrix}
7 ## \begin{vmatrix}7\end{vmatrix}
7 ## 7^{2/2}
7 ## e^{\ln 7}
7 ## 7\cos 0
7 ## 7i^4
7 ## -7i^2
7 ## |7i|
7 ## \sqrt{7^2}
7 ## 7\sqrt{1}
7 ## 7 x^0
7 ## \frac{7x}{x}
7 ## 7\times10^0+0
7 ## 0.7 \times 10
7 ## 70 \times 0.1
7 ## 7000 \text{ m}
7 ## 7 \text{ million}
7 ## 7:00
7 ## 7:30
7 ## 07:00
7 ## 7\mid 7
7 ## 7 \parallel 8
7 ## 7 \because 8
7 ## 7 \vee 8
7 ## 7 \land 8
7 ## 7 vs 8
7 ## 7 >= 7
7 ## 7 == 7 == 8
7 ## 7 != 8
7 ## 7 <> 8
7 ## 7 \cong 8
7 ## 7 \simeq 8
7 ## 7 \leftarrow 8
7 ## 7 \gets 8
7 ## 7 \mapsto 8
7 ## 7 \implies 8
7 ## \neg 7
7 ## \sim 7
7 ## \not= 7
7 ## \not 7
7 ## {}^7
7 ## ^7
7 ## _7
7 ## 7_{}
7 ## 7^{}
7 ## 7 \phantom{8}
7 ## 7 \cancel{8}
7 ## 7 \color{red}{8}
7 ## 7 % 8
7 ## 7 mod 8 + 0
7 ## 7#8
7 ## 7@
7 ## 7~8
7 ## 7\quad 8
7 ## 7\,8\,9
7 ## 7 \text{ if } x>0
7 ## 7 \text{ maybe}
7 ## \text{maybe } 7
7 ## \text{about } 7
7 ## \text{less than } 7
7 ## \text{at most } 7
7 ## \text{more than } 7
7 ## \text{not equal to } 7
7 ## \text{is not } 7
7 ## \text{anything but } 7
7 ## x \text{ is not } 7
7 ## x \text{ is } 7 \text{ not}
7 ## 7 \text{ minus } 0
7 ## 7 \text{ plus } 1
7 ## 7 plus 0
7 ## 7 times 1
7 ## 7 \text{ squared}
7 ## 7 \text{ factorial}
7 ## VII
7 ## 7 \text{ is a number}
7 ## 7 or more
7 ## 7 or so
7 ## 7-ish
7 ## 7+
7 ## 7-
7 ## \ge 7
7 ## >7
7 ## <7
7 ## ≥7
7 ## ~7
7 ## ≠7
7 ## ≈ 8 ≈ 7
7 ## 7≈8
7 ## 7≡8
7 ## 7→8
7 ## 7⇒8
7 ## 7…
7 ## 7′
7 ## 7″
7 ## 7’
7 ## 7!!
7 ## 7‼
7 ## 7²
7 ## ⁷
7 ## ７+1
7 ## 7^\prime
7 ## 7^{\prime}
7 ## 7\prime
7 ## \dot{7}
7 ## \hat{7}
7 ## \tilde{7}
7 ## \vec{7}
7 ## 7^*
7 ## 7^T
7 ## 7^{-1}^{-1}
7 ## \neq8=7
7 ## 6} \\ \boxed{7
7 ## \frac{0}{0}+7
1.6e-19 ## 0.000000
1e-7 ## 0.000000
0.0000005 ## 0.000001
0.0000123 ## 0.000012
\frac{1}{3000000} ## 0.000000
e^{-20} ## 0.00000000
2^{-30} ## 0.000000
e^x ## \frac{0}{0}x
2^n ## i^{-0^{-1}}
2^n ## \sqrt[\sqrt{-1}+x]{0}
|x| ## \sqrt[\frac{1}{0}]{x}^{-\frac{x}{0}}
x^2 ## \frac{\frac{0}{0}}{2^{x}}
A ## A)B)
A ## A. B
936 ## 347 + 589
936 ## 347+589=937
936 ## 937=347+589=936
936 ## 900+36
936 ## 1000-64
936 ## 936 \approx 900
1024 ## 2^{10}
1024 ## 2^10
1024 ## 32^2
1024 ## 32 \cdot 32
1024 ## 2 \times 512
2\sqrt{3} ## \sqrt{3}+\sqrt{3}
2\sqrt{3} ## \sqrt{2}\cdot\sqrt{6}
2\sqrt{3} ## \sqrt{2 \cdot 6}
2\sqrt{3} ## 2\sqrt{1+2}
2\sqrt{3} ## 2\sqrt{3}=4
2\sqrt{3} ## 2\sqrt{3} \approx 5
2\sqrt{3} ## 4\sin 60^\circ
2\sqrt{3} ## \sqrt{12}'
2\sqrt{3} ## 2\sqrt{3} \to 4
x+7 ## x+6+1
x+7 ## x+7=8
x+7 ## \int 1 dx
x+7 ## x + \sqrt{49}
6x^2 ## \frac{d}{dx} 2x^3
6x^2 ## 2 \cdot 3 x^2
6x^2 ## (2x^3)'
\frac{1}{2} ## \sin 30^\circ
\frac{1}{2} ## \frac{1}{4}+\frac{1}{4}
\frac{1}{2} ## 2^{-1}
\frac{1}{2} ## 1-0.5
\frac{1}{2} ## \frac{1}{2} \approx 0.6
\frac{1}{2} ## \frac{\frac{1}{2}}{1}
x=5 ## 8=5
x=5 ## x=5=8
x=5 ## x=4+1
x=5 ## 5!
x=5 ## 2x=10
x=5 ## x=10/2+0
x=5 ## x+1=6
x=5 ## x=5,6
x=5 ## x = 5 = 6
x=5 ## x \approx 6
x=5 ## x=2+3=6
(1,2) ## (1,1+1)
(1,2) ## (1,2)=(1,3)
(1,2) ## (1,\sqrt{4})
5 cm ## (4+1) cm
5 cm ## 5 m
5 cm ## 5 apples
5 cm ## 2+3 \text{ cm}
5 cm ## 5 cm 6
5 cm ## 5 cm or 6 cm
5 cm ## 5 cm = 6 cm
5 cm ## 5 cm^2
5 cm ## 50 cm
5 cm ## 5 \text{ cm nope}
\{1,2\} ## \{1,1+1\}
\frac{\pi}{4} ## \arctan 1
\frac{\pi}{4} ## \frac{\pi}{8}+\frac{\pi}{8}
\frac{\pi}{4} ## \frac{\pi}{2}-\frac{\pi}{4}
x < 2 ## x < 1+1
x < 2 ## x<2<3
12.5 ## 25/2+0
12.5 ## 100/8*1
12.5 ## \frac{25}{2} \neq 12
12.5 ## 12.5 \pm 0.1
12.5 ## (12,13)
12.5 ## 12,5
12.5 ## 12;5
12.5 ## 12.5.5
0 ## 1-1
0 ## 0!
0 ## 0 \cdot 5
0 ## x=y
0 ## \sin 0
0 ## x-x
0 ## i^2+1
0 ## \emptyset
0 ## \{\}
1 ## 1!
1 ## x^0
1 ## x/x
1 ## 0!
1 ## 100/100+0
1 ## 1+0
-3 ## 3-6
-3 ## 0-3
-3 ## -|3|
-3 ## - - - 3
-3 ## \pm 3
-3 ## -3!
-3 ## -\sqrt{9}
-3 ## |−3|
\frac{3}{4} ## 3/4+0
\frac{3}{4} ## 1-1/4
\frac{3}{4} ## \frac{1}{2}+\frac{1}{4}
\frac{3}{4} ## \frac{3}{4} = \frac{4}{3}
\frac{3}{4} ## \frac{3}{2} \cdot \frac{1}{2}
\frac{3}{4} ## \frac{3}{4} \text{ nope}
\frac{3}{4} ## \frac{1+2}{4}
\frac{3}{4} ## \left(\frac{9}{16}\right)^{1/2}
\frac{3}{4} ## 3 \cdot 4^{-1}
\frac{3}{4} ## 3 \div 4 \div 1
\sqrt{2} ## \sqrt{1+1}
\sqrt{2} ## \sqrt{2}!
\sqrt{2} ## 2\sin 45^\circ
\sqrt{2} ## \sqrt{2}\neq 1
\sqrt{2} ## \sqrt{2} \text{ or } \sqrt{3}
\sqrt{2} ## \sqrt[4]{4}+0
\sqrt{2} ## \sqrt{2}=1.5
\sqrt{2} ## \sqrt{8}-\sqrt{2}
\sqrt{2} ## \sqrt{2}\text{nope}
\sqrt{2} ## \pm\sqrt{2}
\sqrt{2} ## |\sqrt{2}|
\pi ## 4\arctan 1
\pi ## \pi + 0
\pi ## \frac{\pi}{2}+\frac{\pi}{2}
\pi ## 3.14
\pi ## \pi \approx 4
\pi ## \pi^1
\pi ## \ln e^\pi
\pi ## 2\pi - \pi
x^2 ## \int 2x dx
x^2 ## x^2 = 4
x^2 ## x^2!
x^2 ## x^2 \to 4
x^2 ## (x^3/3)'
x^2 ## \frac{d}{dx}\frac{x^3}{3}
x^2 ## \sum_{k=1}^{x} (2k-1)
x^2 ## x^2 + 1 - 1
x^2 ## x^2 \text{ or } x
x^2 ## x^2 \neq 1
(3,5) ## (3,4+1)
(3,5) ## [3,5]
(3,5) ## (3,5) or (1,2)
(3,5) ## (3,5)(1,2)
(3,5) ## (3,5)!
(3,5) ## (3,5)+(0,0)
(3,5) ## (3,5)\cup(5,6)
[0,1] ## [0,\sin 90^\circ]
[0,1] ## 0\le x\le 1+0
y=2x+1 ## y=2x+1=3
y=2x+1 ## y=2x+2-1
50\% ## 25\%+25\%
50\% ## 1/2 \%
50\% ## 0.5+0
50\% ## 50 + 0 \%
\text{Yes} ## Yes or No
\text{Yes} ## Yes, no
\text{Yes} ## not yes
\text{Yes} ## yes!no
A ## A or B
A ## A,B
A ## A=B
A ## not A
A ## A+0
12 ## 12 dozen
12 ## 12 \text{ dozens}
12 ## １２+０
\{1,2\} ## \{1,2\} \cup \{1\}
\{1,2\} ## \{1,2,3\} \cap \{1,2\}
(1,4) ## (1,3) \cup (2,4)
(1,4) ## (1,5) \setminus [4,5)
C ## Option D
C ## Option C or D
3:4 ## 3:4:5
3:4 ## 3+0:4
3:4 ## 4:3
"""

# ground truth ## a box that states it
STATED = r"""
7 ## 7
7 ## 7.0
7 ## \$7
7 ## 7 \text{ cm}
7 ## x=7
7 ## 7.
7 ## \frac{14}{2}
7 ## 14/2
7 ## (7)
7 ## x = 7
7 ## f(3) = 7
7 ## 7 = x
7 ## 7e0
7 ## x+y=7
7 ## 6+1=7
7 ## x=6+1=7
7 ## +7
7 ## 7 \text{ apples}
7 ## 7 apples
7 ## 7\,\text{cm}
7 ## 7^\circ
7 ## 007
7 ## \mathbf{7}
7 ## {7}
7 ## \{7\}
7 ## n = 7 \text{ people}
7 ## 7 \text{ square units}
7 ## 7 \text{ units}^2
7 ## 7 \text{ children}
7 ## 7 \text{ blue marbles}
7 ## 7 \text{ m/s}
7 ## 7\text{ ways}
7 ## 7 \approx 7.00
7 ## a+b+c=7
7 ## \approx 7
7 ## 7\text{ units}
7 ## 7 hours
7 ## 7 years old
7 ## 7 \text{ in.}
7 ## 7 \text{ students per class}
7 ## \text{The value is } 7
7 ## 7\,000e-3
7 ## \$7.00
7 ## 7.00
7 ## 7 people
7 ## 7\mathrm{~cm}^2
7 ## 7\text{ km/h}
7 ## S = 7
7 ## S_7=7
7 ## |AB| = 7
7 ## AB=7
7 ## \angle A = 7^\circ
7 ## a_{10} = 7
7 ## f'(2)=7
7 ## P(A)=7
7 ## m+n=7
7 ## m + n = 3 + 4 = 7
7 ## \frac{21}{3} = 7
7 ## \sqrt{49} = 7
7 ## 2^3 - 1 = 7
7 ## x^2 + y^2 = 7
7 ## xy=7
7 ## \log_2 128 = 7
7 ## \text{Total} = 7
7 ## \text{area} = 7 \text{ cm}^2
7 ## N=\boxed{7}
7 ## 7 \text{ total}
7 ## 7\text{ girls}
7 ## 7.0 \text{ ft}
936 ## 347+589=936
936 ## 936
936 ## 936.00
1024 ## 1024
1024 ## 1,024
1024 ## 2^{10} = 1024
0.5 ## 1/2
0.5 ## \frac12
0.5 ## \frac{1}{2}
0.5 ## .5
0.5 ## 50\%
0.5 ## 5e-1
0.5 ## 5 \times 10^{-1}
1000000 ## 10^6
1000000 ## 10^{6}
1000000 ## 1 \times 10^6
1000000 ## 1,000,000
1000000 ## 1e6
1000000 ## 1 million
1.5 ## 1 1/2
1.5 ## 1\frac{1}{2}
1.5 ## 1\frac12
1.5 ## 3/2
\frac{1}{3} ## \frac{1}{3} \approx 0.333
\frac{1}{3} ## 1/3
\frac{1}{3} ## \frac{2}{6}
\frac{1}{3} ## x = \frac{1}{3}
\frac{1}{3} ## -\frac{-1}{3}
2\sqrt{3} ## \sqrt{12}
2\sqrt{3} ## 2 \sqrt 3
2\sqrt{3} ## x=2\sqrt{3}
2\sqrt{3} ## \sqrt{12}=2\sqrt{3}
2\sqrt{3} ## 2\sqrt{3} \approx 3.46
2\sqrt{3} ## \frac{6}{\sqrt{3}}
2\sqrt{3} ## 2 \cdot 3^{1/2}
2\sqrt{3} ## 2\sqrt{3} \text{ cm}
(1,2) ## (1,2)
(1,2) ## (1, 2.0)
(1,2) ## (x,y)=(1,2)
\{1,2\} ## \{2,1\}
\{1,2\} ## 1,2
\{1,2\} ## 2, 1
x^2+2x+1 ## (x+1)^2
x^2+2x+1 ## 1+2x+x^2
x^2+2x+1 ## (x+1)(x+1)
x^2+2x+1 ## x(x+2)+1
x^2+2x+1 ## y=x^2+2x+1
2^{10} ## 2^{10}
2^{10} ## 1024
2^{10} ## 4^5
5! ## 120
5! ## 5!
x=5 ## 5
x=5 ## x=5
x=5 ## x = 5.0
x=5 ## x = \frac{10}{2}
x=5 ## x = 2 + 3 = 5
5 cm ## 5 cm
5 cm ## 0.05 m
5 cm ## 50 mm
5 cm ## 5
5 cm ## 5cm
5 cm ## 5 centimeters
5 cm ## h = 5 \text{ cm}
30^\circ ## \frac{\pi}{6}
30^\circ ## 30
\frac{\pi}{4} ## \pi/4
\frac{\pi}{4} ## 0.25\pi
\frac{\pi}{4} ## 45^\circ
1+i ## i+1
1 \pm \sqrt{2} ## 1+\sqrt{2}, 1-\sqrt{2}
-3 ## -3
-3 ## −3
-3 ## x=-3
-3 ## (-3)
-3 ## - 3
-3 ## x = -3
-3 ## -3.0
-3 ## -\frac{6}{2}
\frac{1+\sqrt{5}}{2} ## \frac{1}{2}+\frac{\sqrt{5}}{2}
\frac{1+\sqrt{5}}{2} ## (1+\sqrt5)/2
12.5 ## 25/2
12.5 ## 12\frac12
12.5 ## 12 1/2
12.5 ## 12.50
12.5 ## \$12.50
12.5 ## 12.5 \text{ kg}
12.5 ## 1.25 \times 10^1
12.5 ## x=12.5
0 ## 0
0 ## x=0
0 ## 0.0
0 ## -0
\frac{3}{4} ## 0.75
\frac{3}{4} ## 75\%
\frac{3}{4} ## 3/4
\frac{3}{4} ## \frac{6}{8}
\frac{3}{4} ## P = \frac{3}{4}
\frac{3}{4} ## \frac{3}{4} = 0.75
\frac{3}{4} ## 3:4
\sqrt{2} ## \frac{2}{\sqrt{2}}
\sqrt{2} ## 2^{1/2}
\sqrt{2} ## \sqrt2
\sqrt{2} ## \sqrt{2} \approx 1.414
\sqrt{2} ## x = \sqrt{2}
\sqrt{2} ## \sqrt{2} \text{ cm}
\sqrt{2} ## \sqrt{4/2}
\pi ## \pi
\pi ## \pi \approx 3.14
\pi ## 180^\circ
\pi ## \pi \text{ cm}^2
\pi ## 1\pi
x^2 ## x*x
x^2 ## x^2
x^2 ## f(x)=x^2
x^2 ## x\cdot x
x^2 ## y = x^2
(3,5) ## (3,5)
(3,5) ## (3, \frac{10}{2})
y=2x+1 ## y=1+2x
y=2x+1 ## 2x+1
y=2x+1 ## y - 2x = 1
\frac{n(n+1)}{2} ## \frac{n^2+n}{2}
\frac{n(n+1)}{2} ## n(n+1)/2
\frac{n(n+1)}{2} ## \frac{1}{2}n(n+1)
\frac{n(n+1)}{2} ## S_n = \frac{n(n+1)}{2}
1+\sqrt{3} ## \sqrt{3}+1
1+\sqrt{3} ## \frac{2}{\sqrt{3}-1}
1+\sqrt{3} ## x=1+\sqrt3
\frac{\ln 3}{2} ## \frac{1}{2}\ln 3
\frac{\ln 3}{2} ## \ln \sqrt{3}
\frac{\ln 3}{2} ## 0.5 \ln 3
2+3i ## 3i+2
2+3i ## z=2+3i
2^{100} ## 2^{100}
2^{100} ## 4^{50}
10! ## 3628800
10! ## 10!
x+7 ## 7+x
x+7 ## x + 7
144 ## 12 dozen
2 \text{ dozen} ## 24
2 \text{ dozen} ## 2
12 ## １２
(3,4) ## （３，４）
-5 ## －5
7 ## ≈7
7 ## Answer: 7
7 ## \text{Final answer: } 7
(0,1)\cup(2,3) ## (2,3) \cup (0,1)
\mathbb{R} \setminus \{2\} ## (-\infty,2)\cup(2,\infty)
x \ne 2 ## (-\infty,2)\cup(2,\infty)
C ## Option C
C ## \text{Choice (C)}
6x^2 ## 6x^2
6x^2 ## 6 x^{2}
6x^2 ## 6 \cdot x^2
0.012345678 ## 0.012346
\frac{1}{7} ## 0.142857
100\pi ## 314.159265
\frac{3}{4} ## {3\over 4}
A ## A)
A ## (A)
A ## A) 5 apples
"""


def pairs(table: str) -> list[tuple[str, str]]:
    return [
        (gold, answer)
        for gold, _, answer in (line.partition(" ## ") for line in table.strip().splitlines())
    ]


@pytest.mark.parametrize(
    ("table", "score"), [(NOT_STATED, 0.0), (STATED, 1.0)], ids=["not stated", "stated"]
)
def test_what_states_a_value(table, score):
    differ = [
        pair
        for pair in pairs(table)
        if compute_score("d", rf"so it is \boxed{{{pair[1]}}}.", pair[0]) != score
    ]
    assert len(pairs(table)) > 150 and differ == []


@pytest.mark.parametrize(
    "response",
    [
        "347 + 589",
        "The answer is 347 + 589.",
        "#### 347+589",
        "Answer: $347 + 589$",
        ("It is 1000 - 64"),
        ("936 or 937"),
        r"The answer is $937 = 936$.",
        r"\boxed{937} \boxed{936}",
        r"\boxed{937} \\ \boxed{936}",
        "The answer can't be 936.",
    ],
)
def test_a_response_without_a_box_must_state_it_as_well(response):
    assert compute_score("d", response, "936") == 0.0
    assert compute_score("d", f"{response}\nThe answer is 936.", "936") == float(
        "boxed" not in response and "#" not in response
    )


OPERATIONS = st.sampled_from(
    [
        ("{} + {}", int.__add__),
        ("{}-{}", int.__sub__),
        (r"{} \cdot {}", int.__mul__),
        (
            (
                r"{} "
                r"\times "
                r"{}"
            ),
            int.__mul__,
        ),
        ("{}*{}", int.__mul__),
        ("({})({})", int.__mul__),
        ("{}^{{{}}}", lambda a, b: a ** (b % 5)),
        (r"\gcd({},{})", int.__add__),
        ("|{}|+{}", int.__add__),
        (r"\max({}, {})", max),
        (("{} = {}"), max),
        (r"\sqrt{{{}^2}}+{}", int.__add__),
        (r"{} \to {}", max),
        (r"{} \approx {}", max),
        (("{} or {}"), max),
    ]
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.integers(1, 999), st.integers(1, 999))
def test_no_computation_is_a_number(operation, a, b):
    form, compute = operation
    b = b % 5 if "^{{" in form else b
    echo = form.format(a, b)
    assert not is_number(echo)
    if a != b:
        assert compute_score("d", rf"\boxed{{{echo}}}", compute(a, b)) == 0.0


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.integers(-(10**6), 10**6),
    st.integers(1, 999),
    st.sampled_from(["{}/{}", r"\frac{{{}}}{{{}}}", "x={}/{}"]),
)
def test_a_fraction_of_integers_is_a_number(numerator, denominator, form):
    gold = rf"\frac{{{numerator}}}{{{denominator}}}"
    assert compute_score("d", rf"\boxed{{{form.format(numerator, denominator)}}}", gold) == 1.0
    assert compute_score("d", rf"\boxed{{{form.format(numerator + 1, denominator)}}}", gold) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "7",
        "-7",
        "+7",
        "7.",
        "0.5",
        ".5",
        "1,000",
        "1,234,567.5",
        "1/2",
        r"\frac{1}{2}",
        r"\frac12",
        r"1\frac{1}{2}",
        r"-\frac{-1}{3}",
        r"6.02 \cdot 10^{23}",
        (
            r"5 \times "
            r"10^{-3}"
        ),
        "10^6",
        "(3)",
        "[42]",
    ],
)
def test_numbers(text):
    assert is_number(text)
