# ruff: noqa: E501
r"""What the tests of other verifiers ask, and what may be tried against them, with the verdicts
that hold here.

From the tests of math-verify, lighteval, NeMo-Skills, Qwen2.5-Math (ToRA), hendrycks MATH, PRM800K,
lm-eval, rLLM and SkyThought; where they disagree, or a rule of ours differs, docs/reward_functions.md says
how. `gold ## content of the box`.
"""

RIGHT = r"""
x = 5, y = 3 ## 5, 3
x = 5, y = 3 ## y = 3, x = 5
x = 5, x = 3 ## \{3,5\}
0 ## x = 0
0 ## x+y = 0
0 ## f(3) = 0
x^2 - 5x + 6 = 0 ## 5x - 6 - x^2 = 0
y = 2x ## y - 2x = 0
-5 ## -5
7425000 ## 7,425,000
1000 ## 1 000
1000 ## 1000.0
1000.0 ## 1,000.0
0.4 ## .4
1000.99 ## 1,000.99
1000.99 ## $1,000.99
1000.99 ## 1,000.99$
1000.99 ## 1,000.99€
1000.99 ## 1,000.99m²
10/9 ## \frac{10}{9}
-10/9 ## -\frac{10}{9}
[0,1) ## [0,1)
1/3 ## \frac13
1 ## \frac3{3}
\sqrt{3} ## \sqrt3
1/3 ## \cfrac{1}{3}
1/3 ## \tfrac{1}{3}
1/3 ## 1/3
1/3 ## \left( \frac{1}{3} \right)
1/3 ## \frac{1}{3} \text{meters}
1/3 ## \frac{1}{3} \textbf{meters}
1/3 ## k = \frac{1}{3}
28\% ## 28 percent
28\% ## 28 pct
28\% ## 28 %
28\% ## 28 percentage
28\% ## 28
2-2p ## 2-2p
\begin{pmatrix} 0 & 3 \\ 0 & -1 \end{pmatrix} ## \begin{pmatrix} 0 & 3 \\ 0 & -1 \end{pmatrix}
14{,}916 ## 14{,}916
14{,}916 ## 14 {, }916
12\text{ and }13 ## 12 $ and $13
(3, \frac{\pi}{2}) ## \left( 3, \frac{\pi}{2} \right)
\text{Evelyn} ## Evelyn
15\mbox{ cm}^2 ## 15
15\mbox{ cm}^2 ## 15\text{ cm}^2
-2,1 ## 1,-2
204_5 ## 204_5
(6,31,-1) ## (6,31,-1)
1 \pm \sqrt{19} ## 1 \pm \sqrt{19}
3 \pm 2 \sqrt{2} ## 3 \pm 2\sqrt{2}
\{1\pm\sqrt{5},-2\} ## \{-2, 1\pm\sqrt{5}\}
f(2) < f(1) < f(4) ## f(2) < f(1) < f(4)
2 \sin b \cos a ## 2 \cos a \sin b
\frac{\pi r}{h+r} ## \frac{\pi r}{r+h}
125 miles ## 125\textnormal{ miles}
[-1, -\frac{1}{2}) \cup (-\frac{1}{2}, 0) \cup (0, 1) \cup (1, \infty) ## [-1, -\tfrac12) \cup (-\tfrac12, 0) \cup (0, 1) \cup (1, \infty)
\sqrt{2}+\sqrt{5} ## \sqrt 2+\sqrt 5
\frac{9}{4}\pi ## \frac94\pi
\{-1\} \cup [0,7) ## \{-1\} \cup [0,7)
x >= 5 ## x \geq 5
x < 3 ## x \lt 3
x \leq 2 ## x <= 2
x > 5 ## x \gt 5
x != 3 ## x \neq 3
x \neq 5 ## x != 5
x \leq 5 ## 5 \geq x
x \geq 5 ## 5 \leq x
x = 11 ## x = 5+5+1 = 11
11 ## x=11
11 ## x\approx11
x < 1 ## -x > -1
x <= 1 ## -x >= -1
k=1 ## 1
1 ## k=1
2x+4y-3=0 ## y=-\frac{1}{2}x+\frac{3}{4}
x^2/4 + y^2/3 = 1 ## x^2/16 + y^2/12 = 1/4
\begin{bmatrix}0 & 0 \\0 & 0\end{bmatrix} ## \begin{pmatrix}0 & 0 \\0 & 0\end{pmatrix}
\begin{pmatrix}1 & 2 \\3 & 4\end{pmatrix} ## \left[\begin{array}{cc}1 & 2 \\3 & 4\end{array}\right]
\begin{pmatrix}1 & 2 \\3 & 4\end{pmatrix} ## \left(\begin{array}{cc}1 & 2 \\3 & 4\end{array}\right)
\begin{pmatrix}\frac{1}{2} & \frac{3}{4} \\ \frac{5}{6} & \frac{7}{8}\end{pmatrix} ## \begin{pmatrix}\frac{1}{2} & \frac{3}{4} \\ \frac{5}{6} & \frac{7}{8}\end{pmatrix}
\frac{1}{12} ## 0.0833333333333333
(1,\frac{9}{2}) ## (1,4.5)
\frac{x+2}{7} ## \frac{x}{7}+\frac{2}{7}
\tan^2(y)+1 ## \sec^2(y)
\begin{pmatrix}-\frac{7}{4}&-2\\4&\frac{1}{4}\\\end{pmatrix} ## \begin{pmatrix}-\frac{7}{4}&-2\\4&\frac{1}{4}\end{pmatrix}
(\begin{pmatrix}-\frac{7}{4}&-2\\4&\frac{1}{4}\\\end{pmatrix}) ## \begin{pmatrix}-\frac{7}{4}&-2\\4&\frac{1}{4}\end{pmatrix}
\begin{pmatrix}\frac{1}{3\sqrt[3]{x}^2}&0&0\\0&1&0\\-\sin(x)&0&0\\\end{pmatrix} ## \begin{pmatrix}\frac{1}{3x^{2/3}}&0&0\\0&1&0\\-\sin(x)&0&0\end{pmatrix}
34x+45y-20z+100=0 ## -34x-45y+20z-100=0
\frac{\sqrt{\sqrt{11}+\sqrt{194}}}{15+2\sqrt{33}} ## \frac{\sqrt{\sqrt{11}+\sqrt{194}}}{2\sqrt{33}+15}
-\frac{2(x^2+6)}{9(x^2-2)\sqrt[3]{x^2-2}^2} ## -\frac{8x^2}{9(x^2-2)^{5/3}}+\frac{2}{3(x^2-2)^{2/3}}
\frac{5\sqrt{42}}{27} ## \frac{10\sqrt{10.5}}{27}
\left( \frac{1}{5},\frac{1}{6} \right) ## (1/5, 1/6)
16386.20 ## \$16,\!386.20
[-2,7] ## x \in [-2,7]
(\tfrac{27}{8},\tfrac{15}{8}) ## (3.375, 1.875)
-2 \le x \le 7 ## x \in [-2,7]
x \in [-2,7] ## -2 \le x \le 7
C ## \text{(C)}
11111111100 ## 11,\! 111,\! 111,\! 100
32349 ## 32,\! 349
(2, 12) \cup (12, 102) ## x \in (2,12) \cup (12,102)
\text{E} ## E
4.123105625617661 ## \sqrt{17}
\frac{1}{3} ## \frac{1}{3}.
\frac{1}{3} ## \frac{1}{3},
\frac{1}{3} ## \frac{1}{3} .
\sqrt{2} ## \sqrt{2}.
(1,2) ## (1,2).
5 ## 5 \text{ cm}.
42 ## 42.
n=1, 2, 3 ## n=1, 2, 3
D = (0, 1) ## D = (0, 1)
F_n = \sum_{k=0}^{n-1} F_k F_{n-k-1} ## F_n = \sum_{k=0}^{n-1} F_{n-k-1} F_k
19, 46, and 82 ## 19, 46, \text{ and } 82
1 - \frac{1}{\mathrm{e}} ## 1 - \frac{1}{\mathrm{e}}
1 - \frac{1}{e} ## 1 - \frac{1}{\mathrm{e}}
\pm 2021 ## {-2021, 2021}
12:00 ## 12:00
40/9 ## 4 4/9
-40/9 ## -4 4/9
71/6 ## +11 5/6
4/9 ## 0 4/9
4 ## 4 0/9
9004/9 ## 1 000 4/9
40/9 ## 4 4/9\%
\tfrac{1}{2} + \frac1{72} ## \dfrac{1}{2} +\frac{1}{72}
10\text{ units} ## 10
10 ## \$10
\left(x-2\right)\left(x+2\right) ## (x-2)(x+2)
0.1 ## .1
10\% ## 10
10\sqrt{3} + \sqrt4 ## 10\sqrt3 + \sqrt{4}
\frac34i ## \frac{3}{4}i
\tfrac83 ## \frac{8}{3}
0.1 ## 10%
x = y ## x = y
x = y + 2 ## x - (y+2) = 0
x = 10 ## 10
[1, 2, 3] ## [1, 2, 3]
0.5 ## 1/2
918.5 ## 918\frac{1}{2}
x^2+2x+1 ## x^2 + 2*x + 1
x^2+2x+1 ## x^2 + 2*x - (-1)
y = x^2+2x+1 ## 2x+ 1+x^2
odd ## \text{odd}
E ## \mathrm{E}
A ## \textbf{A}
f' ## f'
.185 ## 0.185
\frac {1}{2} ## 0.5
10 ## 10%
2.5 ## \frac{5}{2}
(r+5)(r+5) ## (r+5)^2
\frac{\sqrt{3}}{3} ## \frac{\sqrt{3}}{3} \approx 0.577
C ## C. x = 42
C ## C) 42
(C) ## C
c ## C
(D) Alina ## D
D ## (D) Alina
D ## D: Alina
D ## \text{D. Alina}
D ## \textbf{(D)}\ 12
x^2 ## x**2
2x + 3 ## 3 + 2x
31/4 ## 7 3/4
5 ## 005
0 ## -0
0 ## 000
33 ## +033
x+1 ## 1+x
58500 ## 58,500
9a + 11 ## 11 + 9a
\{5\} ## 5
\{1,2,3\} ## 1,2,3
2^10 ## 2^{10}
10^{-2} ## 10^-2
2\pi ## 2π
2\pi ## 2pi
2\pi ## 2 pi
\pi/2 ## π/2
1/sqrt(3) ## \frac{\sqrt{3}}{3}
7*sin(pi*x/5)+1 ## 7 \sin(\frac{\pi}{5}x) + 1
ln(a)*a^x ## a^x \ln a
7*z-cos(z)+11 ## 7z - \cos z + 11
3*cos(sqrt(980/7)*t) ## 3\cos(2\sqrt{35}t)
-pi*2*9^2 ## -162\pi
e^(-8*x)*cos(9*x) ## e^{-8x} \cos(9x)
-5*c+5*1 ## 5 - 5c
(-infinity,5) ## (-\infty, 5)
(-\infty, 5) ## (-inf, 5)
(-\infty, 5) ## (-infinity, 5)
T = 1.02*x+10 ## T = 1.02x + 10
x^3+2*x^2+6 ## x^3+2x^2+6
sqrt(2) ## \sqrt{2}
2*sqrt(3) ## 2\sqrt{3}
\sqrt{2}/2 ## sqrt(2)/2
None ## none
\frac{63}{400} ## \frac{63}{400}
\frac{1}2 ## 1/2
\frac{\sqrt{3}}2 ## \frac{\sqrt{3}}{2}
45 ## 45°
\frac{1}{2} ## \frac{ 1 }{ 2 }
2 million ## 2*10^6
x=5 ## x = 5.
5 ## \{5\}
\text{Yes} ## yes
\text{True} ## True
\text{even} ## \textit{even}
0.66% ## 0.66
3.14\text{ inches} ## 3.14
-1,2,3,10 ## 3,2,10,-1
5x+1 ## \(5x+1\)
1,-2 ## -2 \text{ and } 1
7 ## \{7\}
6 ## 6 \; \text{ways}
8 ## 8\text{ square units}
12 ## 12 \mathrm{~cm}
12 ## 12\mathrm{cm}
\frac{4}{23} ## 8/46
105 ## 35 + 70 = 105
x = 4, y = 2 ## (4, 2)
\text{June 20, 2016} ## June 20, 2016
9:30 ## 9:30
9:30 \text{ a.m.} ## 9:30 am
\left\{\frac{1}{2},\frac{1}{3}\right\} ## \{1/3, 1/2\}
5.0 \times 10^{-3} ## 0.005
6.02*10^23 ## 6.02 \times 10^{23}
1.5 \times 10^{8} ## 150000000
1.5\times10^8 ## 1.5e8
\frac{a+b}{2} ## \frac{1}{2}(a+b)
\frac{n(n+1)(2n+1)}{6} ## \frac{2n^3+3n^2+n}{6}
2^{n+1} ## 2 \cdot 2^n
\cos 2x ## 2\cos^2 x - 1
\sin(2x) ## 2\sin x\cos x
\ln 4 ## 2 \ln 2
\log_2 3 ## \frac{\ln 3}{\ln 2}
e^{i \pi / 3} ## \frac{1}{2} + \frac{\sqrt{3}}{2} i
|x-1| ## |1-x|
\sqrt{x^2} ## |x|
3\sqrt[3]{2} ## \sqrt[3]{54}
\frac{1}{1+\sqrt{2}} ## \sqrt{2}-1
-1 < x < 4 ## (-1,4)
(-1,4) ## \{x | -1 < x < 4\}
(-1,4) ## \{x \mid -1 < x < 4\}
(-\infty,-1) \cup (4,\infty) ## x<-1 \lor x>4
\varnothing ## \emptyset
\emptyset ## \{\}
\text{no real solutions} ## No real solutions.
1000000 ## 10^6
1000000 ## 1,000,000
1000000 ## 1{,}000{,}000
1000000 ## 1\,000\,000
1000000 ## 1 000 000
1000000 ## 1\ 000\ 000
1234.5 ## 1{,}234.5
\$1,250 ## 1250 \text{ dollars}
\$5.50 ## 5.5
12 ## 12 \text{ dollars}
25 ## 25 \text{ cents}
3 ## 3\text{rd}
60^\circ ## 60 \text{ degrees}
60^\circ ## \angle A = 60^\circ
\frac{\pi}{3} ## \frac{\pi}{3} \text{ radians}
\frac{\pi}{3} ## 60^{\circ}
5\frac{1}{4} ## 5.25
5\frac14 ## \frac{21}{4}
-3\frac{1}{2} ## -3.5
-3\frac{1}{2} ## -\frac{7}{2}
1\dfrac{4}{5} ## 1.8
\frac{-1}{2} ## -\frac{1}{2}
\frac{1}{-2} ## -\frac{1}{2}
-\frac{-1}{2} ## \frac12
x \in \{1,2\} ## \{1,2\}
x=1, x=2 ## \{1, 2\}
x_1 = 1, x_2 = 2 ## 1, 2
(x,y) = (1,2) ## (1,2)
(1,2) \text{ and } (3,4) ## (1,2), (3,4)
\{(1,2), (3,4)\} ## (3,4), (1,2)
y = 2x + 3 ## 2x + 3
y = 2x + 3 ## 2x - y + 3 = 0
x^2 + y^2 = 25 ## x^2+y^2=5^2
(x-1)^2+(y+2)^2=9 ## x^2-2x+y^2+4y-4=0
\begin{pmatrix} 1 \\ 2 \end{pmatrix} ## \begin{bmatrix} 1 \\ 2 \end{bmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} ## \left(\begin{array}{c} 1 \\ 2 \end{array}\right)
\begin{pmatrix} 1 & 2 \end{pmatrix} ## \begin{bmatrix} 1 & 2 \end{bmatrix}
\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix} ## -2
\begin{pmatrix} 1/2 & 0 \\ 0 & 1/2 \end{pmatrix} ## \frac{1}{2}\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}
2 ## \boxed{2}
\boxed{2} ## 2
A, C ## A,C
A, C ## C, A
A,B,D ## \text{A, B, D}
ABD ## ABD
AC ## CA
10 \text{ m/s} ## 10 \text{ meters per second}
10 ## 10 \text{ m/s}^2
3600 \text{ s} ## 1 \text{ hour}
2.5 \text{ kg} ## 2500 \text{ g}
0 ## 0^\circ
3:4 ## 3:4
3:4 ## 3 \colon 4
\frac{3}{4} ## 3:4
\infty ## \text{infinity}
-\infty ## -\infty
\infty ## infinity
\text{does not exist} ## Does not exist
7 \text{ or } 8 ## 8 \text{ or } 7
x=7 \text{ or } x=8 ## 7, 8
0.\overline{36} ## \frac{4}{11}
0.\overline{36} ## 0.363636...
2\sqrt{2}i ## 2i\sqrt{2}
i\sqrt{3} ## \sqrt{3}i
a^2-b^2 ## (a-b)(a+b)
\theta = \frac{\pi}{4} ## \frac{\pi}{4}
\frac{\pi}{4} + k\pi ## k\pi + \frac{\pi}{4}
\frac{1}{4}\ln 2 ## \frac{\ln 2}{4}
C + x^2 ## x^2 + C
\frac{x^3}{3} + C ## \frac{1}{3}x^3 + C
\text{(A) and (C)} ## A and C
18^{\circ} C ## 18°C
-40 ## -40^\circ F
1/2 ## \frac{1}{2} \approx 0.5
\dfrac{9}{7} ## \frac{18}{14}
7! ## 5040
\binom{8}{3} ## 56
{8 \choose 3} ## 56
C(8,3) ## C(8,3)
_8C_3 ## _8C_3
3.0 \times 10^4 ## 30{,}000
\sqrt{5} ## 5^{1/2}
\frac{\sqrt[4]{8}}{2} ## 2^{-1/4}
\text{Thursday} ## \textbf{Thursday}
\text{10:45 p.m.} ## 10:45 PM
10:45 ## 10:45
\text{Friday} ## friday
\pm\frac{1}{2} ## \frac{1}{2}, -\frac{1}{2}
\pm\frac{1}{2} ## -\frac12 \text{ or } \frac12
\frac{\sqrt{6} \pm \sqrt{2}}{4} ## \frac{\sqrt{6}+\sqrt{2}}{4}, \frac{\sqrt{6}-\sqrt{2}}{4}
x \ge -2 ## [-2, \infty)
x\geq -2 ## x \geqslant -2
\mathbb{R} \setminus \{2\} ## (-\infty, 2) \cup (2, \infty)
\mathbb{R} ## \text{all real numbers}
(-\infty, 2) \cup (2, \infty) ## \mathbb{R} \setminus \{2\}
(-\infty, 2) \cup (2, \infty) ## x \in \mathbb{R}, x \neq 2
\mathbb{Z} ## \mathbb{Z}
\text{all integers} ## \text{all integers}
5 \cdot 10^3 ## 5000
5 \times 1000 ## 5000
(2 + 3) \times 4 ## 20
\frac{2}{3}\text{ hours} ## 40\text{ minutes}
1{,}440 ## 1440
1,440 \text{ minutes} ## 24 \text{ hours}
\sqrt{13} ## \sqrt{13}\text{ units}
6+9i ## 9i+6
\overrightarrow{AB} ## \overrightarrow{AB}
\mathbf{i} + 2\mathbf{j} ## \mathbf{i}+2\mathbf{j}
\langle 1,2 \rangle ## \langle 1, 2 \rangle
\langle 1,2 \rangle ## (1, 2)
2.00 ## 2
\text{2} ## 2
4,6,8 ## 4, 6, \text{ and } 8
70 \sqrt{2} ## 70\sqrt2
"""

WRONG = r"""
10 ## (9+1)
x = 1/3 ## x = 5+5+1 = 1/3 \approx 11
1/3 ## x=1/3\approx1.3
z = 1 + 1 = 2 ## z = 3+3 = 2
\begin{pmatrix}6 & 8 \\ 10 & 12\end{pmatrix} ## \begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix} + \begin{pmatrix}5 & 6 \\ 7 & 8\end{pmatrix}
\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix} ## \begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix} \begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}
103/9 ## 11 + 4/9
17 ## 17\text{ any text}
x = 5, y = 3 ## \{3,5\}
x = 5, y = 3 ## 3, 5
x = 5, y = 3 ## x = 3, y = 5
0 ## 2x - y + 3 = 0
0 ## x^2 - 5x + 6 = 0
[0,9) ## [0,1)
(0,9) ## [0,9)
1 ## -[0,1)
0.28 ## 28
28/100 ## 28
28 ## 28/100
\frac{28}{100} ## 28
2 ## AZYUK2A
x > 5 ## x < 5
x \geq 5 ## x \leq 5
7 = 11a+c ## 11a+c
x < 1 ## x > -1
a +3z = 0 ## 0
2x + z = 1 ## 1
a^2 + b = 0 ## 0
\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix} ## \begin{pmatrix}1 & 2 \\ 3 & 5\end{pmatrix}
(a+5)(b+2) ## (+5)(b+2)
2 ## \frac{1+\sqrt{5}}{2}
4 ## \frac{34}{16}+\frac{\sqrt{1358}}{16}
1\sqrt{19} ## 1
x+2n+1 ## x+1
[0,1) ## (0, 1)
[-3,2] ## (-\infty, -3] \cup [2, \infty)
(\tfrac{27}{8},\tfrac{15}{8}) ## (0, 0)
(3,1) ## \{1,3\}
1112112_3 ## 1112122_3
32349 ## 32, 349
4 ## 4\sqrt{2}
2 ## 2^{10}.
1 ## 1/3.
1, 2, 3 ## 1, 2, 3, ...
n=2, 3, 4 ## n=1, 2, 3
D = (0, 1) ## D = (0, 1.5)
F_n = \sum_{k=0}^{n-1} F_k F_{n-k-1} ## F_n = \sum_{k=0}^{n-2} F_k F_{n-k-2}
19, 46, and 82 ## 21, 36, and 82
1 - \frac{1}{\mathrm{e}} ## 1 + \frac{1}{\mathrm{e}}
\pm 2021 ## 2021
12:00 ## 1:00
\frac{1}{2004!} ## \frac{1}{2006!}
\frac{1}{2^{99}} ## \frac{1}{2^{98}}
4 ## 4 4/9
4 ## 4 4/0
0 ## 4 0/0
11 ## 11 6/6
12 ## 11 6/6
73/6 ## 11 7/6
139/90 ## 11/10 4/9
95/9 ## 11 + 4/9
\tfrac{1}{2} + \frac1{72} ## \frac{1}{2} + 2/3
10, 4, 2 ## 4, 12, 2
10\text{ units} ## 100
5x - 7y + 11z + 4 = 0 ## x + y - z + 2 = 0
10 ## 20
10% ## 0.2
x = y ## x = z
5 ## 5.001
x^2+2x+1 ## x^3+2x+1
odd ## \text{oddd}
E ## \mathrm{E}*2
\sqrt{67},-\sqrt{85} ## \sqrt{67}
\sqrt{67} ## \sqrt{67},-\sqrt{85}
2x+3 ## 2x+4
x+1 ## not math
\frac{1}{3} ## 0.33
[1,2] ## [1,2)
5 ## 42
42 ## 5
3 ## -3
(1, 2, 3) ## (1, 2)
1,-3 ## 1,-2
1,3 ## 1,2
3, 5, 9 ## 3, 5, 7
2.05 ## 2.5
\frac{2}{1} ## \frac{1}{2}
\sqrt{3} ## \sqrt{2}
3.14159 ## \pi
\pi ## 2\pi
[0,1] ## (0,1)
(0,1] ## [0,1)
1 ## 10
1/2 ## \frac{1}{2}x
2/0 ## 1/0
42 ## 1/0
2.2892 ## 2.3
1.97423402868049 ## 1.97
0.160257708151404 ## 0.16
0.657894736842105 ## 25/37
x^3 ## x^2
\cos(x) ## \sin(x)
5(1+\sqrt{2}) ## 10\sqrt{2}
54 ## 162
t+1 ## x+1
e^{2x} ## e^{x}
\frac{1}{x^2} ## \frac{1}{x}
(x, y) ## (x, t)
(1, n) ## (1, f)
(1, 2) ## (1, 1)
B ## A
AB ## AC
A ## A, B, C, D
A ## A or B
A ## A, B, C, D, E
A ## ABCD
A ## A \text{ or } B
A ## \text{A or B}
A ## \text{not A}
A ## \text{(A) or (B)}
A ## (A)(B)(C)(D)
A ## all of the above
C ## B. C is wrong
(D) Alina ## C
(A) Cecile ## C
1 ## 1 or 2
1 ## 1 \text{ or } 2
1 ## 1, 2
1 ## \{1, 2\}
1 ## 1 \cup 2
1 ## 1 \text{ and } 2
7 ## 7 \text{ or } 8
7 ## 6 or 7
7 ## \text{7 or 8}
7 ## \text{either 7 or 8}
7 ## 7/8
7 ## 7;8
7 ## 7 8
7 ## 7 \\ 8
7 ## 7 & 8
7 ## 7|8
7 ## 7\ 8
7 ## x = 7 \text{ or } x = 8
7 ## x = 7, 8
7 ## \pm 7
7 ## \approx 7.1
7 ## 6 < x < 8
7 ## x \in \{7, 8\}
7 ## 7 \neq 8
7 ## [6, 8]
7 ## (7, 7)
7 ## 7, 7
7 ## 7 = 8
7 ## 8 = 7 = 9
7 ## x = x
7 ## 0 = 0
x = 7 ## x = x
x = 7 ## 0 = 0
x = 7 ## 7 = 7
x = 7 ## y = 8
x=7 ## \text{True}
7 ## \text{True}
7 ## 7x
7 ## x7
7 ## 7 + x
7 ## 7 - 0x + y
7 ## f(7)
7 ## answer
7 ## x
7 ##
7 ## ?
7 ## \text{unknown}
7 ## 7?8
7 ## \{\}
7 ## \emptyset
7 ## \infty
7 ## nan
7 ## NaN
7 ## \text{nan}
7 ## 0/0
7 ## 7/0
7 ## __import__('os').system('id')
7 ## eval("7")
7 ## lambda: 7
7 ## \operatorname{eval}(7)
7 ## print(7)
7 ## exit()
7 ## [7 for x in range(10)][0]
7 ## {7}[0]
7 ## 10**10**10
7 ## 7 + 10**10**10
7 ## 9^{9^{9^9}}
7 ## 7 \cdot 10^{10^{10}} / 10^{10^{10}}
7 ## \text{the answer is 7 but also 8}
7 ## \text{I think it is 7}8
7 ## 77
7 ## 7.0001
7 ## 7.000001
7 ## -7
7 ## 7\%8
7 ## 0.7
7 ## 700\%0
7 ## 7^2
7 ## 7!
7 ## \sqrt{7}
7 ## 7i
7 ## 7 \pmod{8} \text{ or } 8
1/3 ## 0.33
1/3 ## 0.3333
0.3333 ## 1/3
\frac{100}{3} ## 33.3
33.3 ## \frac{100}{3}
(\frac{3}{5},\frac{8}{3}] ## (0.6,2.6667]
3.1416 ## 3.14159
2.0001 ## 2
0.75 ## 75
75 ## 0.75
\begin{pmatrix}\frac{1}{3}\\ \frac{1}{5} \end{pmatrix} ## \begin{pmatrix}0.33\\0.2 \end{pmatrix}
-6:30 ## 6:30
\text{Monday} ## \text{Sunday}
\text{odd} ## \text{even}
\text{yes} ## \text{no}
\text{True} ## \text{False}
\text{June 20} ## \text{June 21}
\text{June 20} ## \text{July 20}
1000 ## 1,00,0
1000 ## 10,00
1000 ## 1.000
1.000 ## 1000
\sqrt{2} ## \sqrt{-2}
\sqrt{2} ## 1.414
e ## 2.718
\pi ## 22/7
\pi ## 3.1416
2\pi ## 6.28
(1,2),(3,4) ## (1,2)
(1,2) ## (1,2),(3,4)
(1,2),(3,4) ## (1,4),(3,2)
x=1,y=2 ## x=2,y=1
(x,y)=(1,2) ## (y,x)=(1,2)
x=5 ## y=5
y=2x+1 ## x=2y+1
y=2x+1 ## y=2x-1
x+y=3 ## x-y=3
\begin{pmatrix}1\\2\end{pmatrix} ## \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} ## \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1&0\\0&1\end{pmatrix} ## 1
5 \text{ cm} ## 5 \text{ m}
10 \text{ m/s} ## 10 \text{ km/h}
60^\circ ## 60\%
50\% ## 50 \text{ dollars}
1\frac{1}{2} ## 1\frac{1}{3}
1\frac{1}{2} ## \frac{11}{2}
\frac{1}{2} ## 1\frac{1}{2}
3:4 ## 4:3
3:4 ## 3:4:5
3:4 ## 7
10^{-7} ## 0
1e-7 ## 0
10^{20} ## 10^{20}+1
2^{100} ## 2^{100}+1
100! ## 100!+1
\binom{8}{3} ## \binom{8}{4}
k\pi ## 2k\pi
\frac{\pi}{4}+k\pi ## \frac{\pi}{4}+2k\pi
x^2+C ## x^2
2+3i ## 2-3i
AB ## BA and AB
\text{listen} ## \text{silent}
\text{Bob} ## \text{Bobby}
\text{Bob} ## \text{Alice and Bob}
\text{Bob} ## \text{Bob or Alice}
\emptyset ## 0
0 ## \emptyset
\{0\} ## \emptyset
\{1,2\} ## \{1,2,3\}
[1,\infty) ## (1,\infty)
(-\infty,1] ## [1,\infty)
(1,2)\cup(3,4) ## (1,4)
(1,2)\cup(3,4) ## (1,2)
"""

RESPONSES = [
    ("9", "Answer \\[ 9 \\]", True),
    ("9", "Answer $ 9 $", True),
    ("9", "Answer $$ 9 $$", True),
    ("9", "Answer \\( 9 \\)", True),
    ("10", "Answer \\( (9+1) \\)", False),
    ("9", "Answer \\[ \n 9 \n \\]", True),
    ("9", "Answer $$ \n 9 \n $$", True),
    ("28\\%", "$28$ %", True),
    ("28\\%", "$28$ percent", True),
    ("28\\%", "$\\boxed{28}$ pct", True),
    ("x >= 5", "Therefore $x \\geq 5$ is the solution.", True),
    ("x < 3", "We find that $x \\lt 3$.", True),
    ("2/3", "Therefore, the probability that Alice wins the game is 2/3. <|im_start|>user", True),
    (
        "12",
        (
            "Therefore, there are 12 distinct arithmetic sequences that meet the three given "
            "conditions. I hope it is correct."
        ),
        True,
    ),
    ("(7,6)", "So, the ordered pair $(x, y)$ that solves the system is $(7, 6)$.", True),
    ("[0,1)", "Final Answer: The final answer is $(0, 1)$. I hope it is correct.", False),
    ("120", "Final Answer: The volume of $ABCDEFGH$ is 120. I hope it is correct.", True),
    ("12000023", "Final Answer: The final answer is 12,000,023. I hope it is correct.", True),
    ("16386.20", "The answer is $16,\\!386.20$. I apologize", True),
    (
        "19",
        "Final Answer: The maximum number of points that could be in the domain of $f(x)$ is 19.",
        True,
    ),
    ("34", "Final Answer: The largest $n$ is 34.", True),
    (
        "100\\%",
        "Therefore, the minimum error in the measurement of the position increases by 100%.",
        True,
    ),
    (
        "7.78",
        "So, Anna pays approximately $7.78 for her fudge. Final Answer: The final answer is 7.78.",
        True,
    ),
    (
        "10455",
        (
            "After six months he has $10,000 + $200 = $10,200. Final Answer: The final answer is "
            "$10,455$. I hope it is correct."
        ),
        True,
    ),
    ("[-2,7]", "Therefore the interval is $[-2,7]$", True),
    (
        "(-6,10)",
        (
            "The solution is \\( x \\in (-6, 10) \\). Final Answer: The final answer is \\((-6, "
            "10)\\). I hope it is correct."
        ),
        True,
    ),
    (
        "{1,-2}",
        (
            "The integers are \\boxed{-2} and \\boxed{1}. </think> Thus: \\[ \\boxed{-2} \\quad "
            "\\text{and} \\quad \\boxed{1}. \\]"
        ),
        True,
    ),
    ("1,-2", "Thus: \\[ \\boxed{-2} \\quad \\text{and} \\quad \\boxed{1}. \\]", True),
    ("3, 5, 7", "Final answers: \\boxed{3}, \\boxed{5}, \\boxed{7}", True),
    ("4", "So \\boxed{4}. Therefore \\boxed{4}.", True),
    ("4", "\\boxed{4}, \\boxed{4}", True),
    ("4", "The answer is \\boxed 4", True),
    ("7", "So we get $\\boxed 7$ as the answer.", True),
    ("\\frac{1}{2}", "The answer is $\\frac{1}{2}$", True),
    ("42", "I don't know", False),
    ("40/9", "The answer is 4 4/9.", True),
    ("4", "The answer is 4 4/9.", False),
    ("1000.99", "the number is not 10 which is 1,000.99€", True),
    ("1000.99", "not it's not 10 it's 1,000.99m²", True),
    ("220", "Janeth will still have 220 $ to pay in 12 months. The answer is 220.", True),
    ("C", "thinking about it I think the correct answer is C", True),
    ("C", "The answer is (C)", True),
    ("B", "So the answer is B.", True),
    ("D", "Answer: D", True),
    ("A", "Answer: (A)", True),
    ("B", "**Answer:** B", True),
    ("C", "The answer is B.", False),
    ("D", "The answer is A, B, C or D.", False),
    ("D", "The answer is A or D.", False),
    ("A", "The answer is A or D.", False),
    ("Monday", "The answer is Monday.", True),
    ("Monday", "The answer is Tuesday.", False),
    ("yes", "The answer is yes.", True),
    ("yes", "The answer is yes or no.", False),
    ("no", "The answer is yes or no.", False),
    ("8", "The answer is 7 or 8.", False),
    ("7", "The answer is 7 or 8.", False),
    ("8", "The answer is $7$ or $8$.", False),
    ("8", "It is 7 or 8", False),
    ("7", "It is either 7 or 8.", False),
    ("8", "The answer is 7, 8.", False),
    ("8", "#### 7 or 8", False),
    ("7", "#### 7 or 8", False),
    ("7", "#### 7, 8", False),
    ("8", "\\boxed{7} or \\boxed{8}", False),
    ("8", "\\boxed{7}, \\boxed{8}", False),
    ("8", "$\\boxed{7}$ or $\\boxed{8}$", False),
    ("8", "\\boxed{7} \\boxed{8}", False),
    ("8", "\\boxed{7}\n\n\\boxed{8}", False),
    ("8", "\\boxed{7} (or \\boxed{8})", False),
    ("8", "\\boxed{7 \\text{ or } \\boxed{8}}", False),
    ("8", "\\boxed{\\boxed{8}}", True),
    ("8", "\\boxed{\\fbox{8}}", True),
    ("8", "\\boxed{7} is wrong, it is \\boxed{8}", True),
    ("7", "\\boxed{7} is wrong, it is \\boxed{8}", False),
    ("8", "\\boxed{8}\\boxed{}", False),
    ("8", "\\boxed{}", False),
    ("8", "the answer is 8 \\boxed{}", False),
    ("8", "\\boxed {8}", True),
    ("8", "\\fbox{8}", True),
    ("8", "\\boxed{8", False),
    ("8", "\\boxed{\\text{8}}", True),
    ("8", "\\boxed{ 8 }", True),
    ("2", "He had 3 apples, ate 1, so 2 remain.", True),
    ("1234.50", "The total is $1,234.50", True),
    ("-40", "net change of -$40", True),
    ("-3", "the temperature drops to -3", True),
    (".5", "a probability of .5", True),
    ("42", "So the answer is 42.", True),
    ("72", "we have 3, 4 and then 72 eggs", True),
    ("7", "The answer is 7.", True),
    ("4", "The answer is 3. Wait, the answer is 4.", True),
    ("15", "we compute 12 then 15", True),
    ("17", "The answer is 17.", True),
    ("8", "first 3 then 8", True),
    ("1234", "work...\n#### 1,234", True),
    ("2", "<think>maybe \\boxed{1}</think> final \\boxed{2}", True),
    ("36", "First 64, therefore 36", True),
    ("5x+1", "The answer is \\(\\boxed{5x+1}\\). Great!", True),
    ("1/2", "I think the final answer is $ \\boxed{\\frac12} $.", True),
    ("\\text{Evelyn}", "... therefore the answer is \\text{Evelyn}", True),
    ("5\\sqrt{2}", "Hence, the final answer is $5\\sqrt{2}$.", True),
    ("3.14", "Answer: 3.14", True),
    ("500", "#### $500", True),
    ("-5", "#### -5", True),
    ("2", "#### 1\nmore work\n#### 2", True),
    ("x^2+1", "The answer is x^2+1", True),
    ("x^2+1", "The final answer is $x^2+1$.", True),
    ("72", "答案是72", True),
    ("13", "所以一共有3 + 10 = 13只鸟和鹳鸟。", True),
    ("72", "答案是72。", True),
    ("72", "<think>It is 71?</think><answer>72</answer>", True),
    ("72", "<answer>\n72\n</answer> This is 5.", True),
    ("5", "<answer>72</answer> This is 5.", False),
    ("C", "<answer>C</answer>", True),
    ("C", "<answer>C or D</answer>", False),
    ("72", "<answer>70 + 2</answer>", False),
    ("C", "The correct option is C.", True),
    ("C", "The answer is option C.", True),
    ("D", "The correct option is C. Option D is wrong.", False),
    ("72", "Final answer: `72`", True),
    ("72", "`72`", True),
    ("70", "The cost is 100 - 30 = 70", True),
    ("300", "12000/40 = 300 minutes.", True),
    ("0", "So the os then when we 9/3 we get 8 so the answer is 0", True),
    ("1", "so $x+y = 1000$ therefore answer is $1$", True),
    ("8", "7, 8", False),
    ("7, 8", "8, 7", True),
    ("8", "3 + 4 = 7, 7 + 1 = 8", True),
]
"""(ground truth, response, whether it is right)."""
