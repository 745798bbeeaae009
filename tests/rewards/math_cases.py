"""Pairs of a ground truth and the content of a box, as `gold ## answer`: the same to mathematics,
and not."""

RIGHT = r"""
3/2 ## 1 1/2
-3/2 ## -1 1/2
\frac{3}{2} ## 1\ 1/2
\frac{7}{4} ## 1 \frac{3}{4}
1\frac{1}{2} ## 1.5
2.5 ## 2½
1/2 ## ½
(-\infty, 2) ## x<2
(-\infty,2] ## x \le 2
(-\infty,2] ## x \leq 2
(-\infty,2] ## x≤2
[2,\infty) ## x \geqslant 2
(2,\infty) ## 2 < x
(1,3) ## 1<x<3
(1,3) ## 3 > x > 1
[1,3) ## 1 \le x < 3
(1,3] ## 1 < t \leq 3
(1, 3) ## x \in (1,3)
x \in (1,3) ## (1,3)
x<2 ## (-\infty,2)
1 \le x \le 3 ## [1,3]
(-\infty,1)\cup(3,\infty) ## x<1 \text{ or } x>3
(-\infty,1)\cup(3,\infty) ## x>3 or x<1
(-\infty,2)\cup(2,\infty) ## x \neq 2
(-\infty,\infty) ## \mathbb{R}
(-\infty,\infty) ## \text{all real numbers}
x > 3 ## 3 < x
x>5 ## x > 5
(-\frac{1}{2}, \frac{3}{4}) ## -1/2 < x < 3/4
(0, \pi) ## 0<\theta<\pi
2+3i ## 3i+2
1+i ## \frac{2}{1-i}
1000000 ## 1 million
1000000 ## 1\text{ million}
2500000 ## 2.5 million
3000 ## 3 thousand
1500000000 ## 1.5 billion
2000000 ## \$2 million
2000000 ## 2 million dollars
1e12 ## 1 trillion
AB ## \overline{AB}
\overline{AB} ## AB
2 ## 2 \pmod 5
2 ## 2 \pmod{5}
2 ## 2 \mod 5
2 ## 2 \bmod 5
2 \pmod 5 ## 2
2 \pmod{5} ## x \equiv 2 \pmod 5
2 \pmod 5 ## 7 \pmod{5}
1/3 ## 0.\overline{3}
\frac{1}{6} ## 0.1\overline{6}
\frac{4}{3} ## 1.\overline{3}
-\frac{1}{3} ## -0.\overline{3}
0.\overline{3} ## \frac13
\frac{1}{7} ## 0.\overline{142857}
1 ## 0.\overline{9}
1/3 ## 0.\bar{3}
1/3 ## 0.\dot{3}
0.5 ## 50\%
50\% ## 0.5
50 ## 50\%
50\% ## 50
50\% ## \frac{1}{2}
50\% ## 50 \text{ percent}
50 ## 50 percent
12.5\% ## 12.5
0.125 ## 12.5\%
4210_5 ## 4210_{5}
4210_5 ## 4210
4210_5 ## 4210_{\text{five}}
4210_5 ## 4210 \text{ (base 5)}
4210_5 ## 4210 base 5
1A_{16} ## 26_{10}
11_2 ## 3_{10}
6:30 ## 6:30
6:30 ## 06:30
6:30 ## 6:30 p.m.
6:30 \text{ p.m.} ## 6:30 PM
1:2 ## 2:4
1:2 ## 1/2
1:2:3 ## 2:4:6
9:16 ## \frac{9}{16}
3:2 ## 3 : 2
1:\sqrt{2} ## \sqrt{2}:2
5 ## 5 cm
5 \text{ cm} ## 5
5 cm ## 5 \text{ cm}
5 \text{ cm} ## 5 \text{ centimeters}
1 m ## 100 cm
1\text{ m} ## 100\text{ cm}
1 \text{ hour} ## 60 minutes
2 km ## 2000 m
36 \text{ cm}^2 ## 36 \text{ square centimeters}
36 ## 36 \text{ cm}^2
36 \text{ cm}^2 ## 36 cm^2
36 cm² ## 36 \text{ cm}^{2}
10 \text{ m/s} ## 36 \text{ km/h}
60 mph ## 60 miles per hour
60 \text{ mph} ## 60
5 dollars ## \$5
\$5 ## 5
5 ## \$5
\$5 ## 5 \text{ dollars}
\$0.50 ## 50 cents
5 ## 5 apples
5 apples ## 5
5 \text{ apples} ## 5 apples
6\pi ## 6\pi \text{ cm}
6\pi \text{ cm} ## 6\pi
90^\circ ## 90
90 ## 90^\circ
90^\circ ## 90 degrees
180^\circ ## \pi
\frac{\pi}{2} ## 90^\circ
24 ## 2 dozen
5 m ## 5m
3,5 ## 5, 3
3,5 ## 3 \text{ and } 5
3,5 ## x=3 \text{ or } x=5
3,5 ## \{3,5\}
\{1,2,3\} ## \{3,2,1\}
(1,2) ## (1, 2)
(1,2) ## (1.0, \frac{4}{2})
(1,2,3) ## (1,2,3)
(0.5, 1) ## (\frac12, 1)
(1,2) ## x=1, y=2
3 \pm \sqrt{2} ## 3+\sqrt2, 3-\sqrt2
\pm 3 ## 3,-3
\pm 3 ## \pm3
[2,5) ## \left[2,5\right)
[0,1]\cup[2,3] ## [2,3]\cup[0,1]
\begin{pmatrix}1&2\\3&4\end{pmatrix} ## \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix}\frac12\\0\end{pmatrix} ## \begin{pmatrix}0.5\\0\end{pmatrix}
Monday ## \text{monday}
\text{Alice} ## Alice
B ## \text{(B)}
B ## (B)
\text{no solution} ## No solution
xy ## yx
2x+1 ## y=2x+1
y=2x+1 ## 2x+1
y=2x+1 ## y = 1+2x
x+y=3 ## y=3-x
x+y=3 ## 3=y+x
y=3-x ## 3-x
x^2-1 ## (x-1)(x+1)
2^{10} ## 2**10
2^{2017}-1 ## 2^{2017} - 1
2^{2017} ## 2 \cdot 2^{2016}
2023! ## 2023 \cdot 2022!
10^{10^{10}} ## 10^{10^{10}}
0 ## -0
1.5 ## 1.50
300000 ## 3 \times 10^5
300000 ## 3×10^5
0.00012 ## 1.2 \cdot 10^{-4}
10,000 ## 10000
-5 ## −5
\frac{1}{\sqrt{2}} ## \frac{\sqrt{2}}{2}
\frac{a}{b} ## a/b
e^{2x} ## (e^x)^2
\sin^2 x + \cos^2 x ## 1
x=5 ## 5
x = 5 \text{ cm} ## 5
5 ## x = \frac{10}{2} = 5
60 ## \angle ABC = 60^\circ
(180-x)^\circ ## 180-x
\text{even} ## even
12 ## 12 \text{ ways}
3\text{ hours} ## 3 hrs
1/2 cup ## \frac{1}{2} \text{ cups}
0.75 ## \frac{3}{4}
\emptyset ## \{\}
\frac{1}{2} ## $\frac{1}{2}$
5 ## \textbf{5}
5 ## \mathbf{5}
\text{(C)} ## C
C ## \text{C}
C ## \textbf{(C)}
5 ## 5.0
10 ## 10.00
1,000,000 ## 10^6
1000000 ## 10^{6}
\sqrt{3}/3 ## 1/\sqrt{3}
2\sqrt{3}+1 ## 1+2\sqrt3
(x-2)(x+3) ## (x+3)(x-2)
x^2+x-6 ## (x-2)(x+3)
\frac{x+1}{x-1} ## \frac{-(x+1)}{1-x}
\log_{10} 100 ## 2
\tan^{-1}(1) ## \frac{\pi}{4}
\arctan 1 ## \pi/4
\begin{pmatrix} -1 \\ 2 \end{pmatrix} ## \begin{pmatrix}-1\\2\end{pmatrix}
\left(\frac{1}{2},\frac{3}{4}\right) ## (0.5, 0.75)
(0,1),(2,3) ## (2,3),(0,1)
\{(0,1),(2,3)\} ## \{(2,3),(0,1)\}
-\frac{3}{4} ## \frac{-3}{4}
-\frac{3}{4} ## -0.75
3.5 ## \frac{7}{2}
3\frac{1}{2} ## 3.5
3\frac{1}{2} ## \frac{7}{2}
2\pi ## 2π
x \ge 0 ## [0,\infty)
[0,\infty) ## x\geq0
(-\infty, -1] \cup [1, \infty) ## x \le -1 \text{ or } x \ge 1
(-\infty, -1] \cup [1, \infty) ## (-\infty,-1]\cup[1,+\infty)
[-2,2] ## -2\leq x\leq 2
\{x \mid 1<x<3\} ## (1,3)
1 < x < 3 ## 1<x<3
(2,\infty) ## (2, +\infty)
0 ## 0.0
30\% ## 30
\$1{,}250 ## 1250
\$12.50 ## 12.5
12.50 ## \$12.50
18 ## \$18.00
18 dollars ## 18
25 ## 25 \text{ square units}
25 ## 25 \text{ units}^2
120 ## 120^{\circ}
\frac{\pi}{3} ## 60^\circ
15 \text{ minutes} ## 15 min
45 ## 45\text{ miles per hour}
\text{June 20} ## June 20
\text{Tuesday} ## Tuesday.
f(x)=x^2 ## x^2
y = \frac{1}{2}x+3 ## y = 0.5x + 3
2x+y=5 ## y=5-2x
x=\pm 2 ## 2, -2
\pm 2 ## x = 2 \text{ or } x = -2
-2,2 ## \pm 2
1 \pm \sqrt{5} ## 1+\sqrt{5}, 1-\sqrt{5}
\frac{1\pm\sqrt5}{2} ## \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}
\{1, 2, 3\} ## 1,2,3
1,2,3 ## 3, 2, 1
1, 2, 3 ## 1, 2, and 3
a+b ## b+a
\alpha+\beta ## \beta+\alpha
n(n+1)/2 ## \frac{n^2+n}{2}
2^n ## 2^{n}
4^n ## 2^{2n}
e^{x+y} ## e^x e^y
\binom{n}{2} ## \frac{n(n-1)}{2}
n! ## n!
\frac{n!}{k!} ## \frac{n!}{k!}
i ## \mathrm{i}
-1+2i ## 2i-1
3(\cos 60^\circ + i\sin 60^\circ) ## \frac32+\frac{3\sqrt3}{2}i
e^{i\pi/2} ## i
|3+4i| ## 5
\cos 120^\circ ## -\frac12
\sin 45^\circ ## \frac{\sqrt2}{2}
\sin \frac{\pi}{2} ## 1
\tan 60° ## \sqrt3
0.1\overline{6} ## \frac16
0.\overline{142857} ## 1/7
2.\overline{6} ## 8/3
1011_2 ## 1011_{2}
1011_2 ## 11_{10}
4:30 ## 4:30 pm
4:30 ## 4:30 \text{ PM}
2:3 ## 4:6
2:3 ## 2 : 3
2:3 ## \frac{2}{3}
3 \text{ m} ## 300 \text{ cm}
1.5 km ## 1500 m
2 hours ## 120 minutes
90 minutes ## 1.5 hours
1 kg ## 1000 g
1 ft ## 12 in
1 yard ## 3 feet
72 \text{ km/h} ## 20 \text{ m/s}
9.8 \text{ m/s}^2 ## 9.8 m/s^2
1 \text{ L} ## 1000 \text{ mL}
5 \text{ million} ## 5000000
3.2 billion ## 3200000000
7 hundred ## 700
12 thousand ## 12,000
12000 ## 12 thousand people
x \equiv 3 \pmod 7 ## 3 \pmod{7}
3 ## x \equiv 3 \pmod{7}
2^{100} ## 4^{50}
\frac{1}{2^{100}} ## 2^{-100}
\overline{CD} ## CD
\angle ABC ## ABC
\triangle ABC ## \triangle ABC
\vec{v} ## \vec{v}
42 ## 42\ \text{m}
42 ## 42~\text{m}
42 ## 42\,\text{m}
42 ## 42m
42 ## 42 meters
42 ## x = 42
42 ## $42$
42 ## The answer is 42
42 ## n = 42
42 ## \text{The answer is } 42
42 ## 42.
42 ## 42,
42 ## 42 \quad
42 ## {42}
42 ## (42)
42 ## [42]
42 ## +42
42 ## 042
42 ## 42.000
42 ## \approx 42
42 ## = 42
\text{five} ## five
\text{undefined} ## undefined
\text{True} ## true
\text{blue, green} ## blue, green
100 cm ## 1 m
10^3 ## 1000
5e3 ## 5000
5E3 ## 5000
1.5e+3 ## 1500
6.02e23 ## 6.02 \times 10^{23}
6.02\times 10^{23} ## 6.02e23
0.000001 ## 10^{-6}
10^{-6} ## 1e-6
\frac{5}{9}(F-32) ## \frac{5(F-32)}{9}
\sqrt{x^2+1} ## (x^2+1)^{1/2}
\sqrt{50} ## 5\sqrt{2}
\sqrt[4]{16} ## 2
\lceil 2.1 \rceil ## 3
\gcd(12,18) ## 6
\max(1,2) ## 2
\frac{d}{dx} x^2 ## 2x
\int 2x dx ## x^2
\lim_{x \to 0} \frac{\sin x}{x} ## 1
\sum_{n=1}^{10} n ## 55
\prod_{k=1}^{4} k ## 24
1/2+1/3 ## 5/6
\begin{bmatrix}1&0\\0&1\end{bmatrix} ## \begin{pmatrix}1&0\\0&1\end{pmatrix}
\begin{vmatrix}1&2\\3&4\end{vmatrix} ## -2
\det\begin{pmatrix}1&2\\3&4\end{pmatrix} ## -2
\langle 1,2,3\rangle ## (1,2,3)
\frac{-1 \pm i\sqrt{3}}{2} ## \frac{-1+i\sqrt3}{2}, \frac{-1-i\sqrt3}{2}
\frac{-1 \pm i\sqrt{3}}{2} ## \frac{-1 - \sqrt{3}i}{2}, \frac{-1+\sqrt{3} i}{2}
\$32,\!348 ## 32348
\$32,\!348 ## \$32,348
14\text{ cm}^2 ## 14
\dfrac{1}{2}\text{ cup} ## 1/2
2:00 \text{ p.m.} ## 2:00 PM
\text{(E)} ## E
\textbf{(E)}\ 12 ## \textbf{(E)}\ 12
(-\infty,-2)\cup(-2,\infty) ## (-\infty, -2) \cup (-2, \infty)
(-\infty, 0) \cup (0, \infty) ## x \ne 0
x = 5, y = 3 ## (5, 3)
\left\{ 1, 2 \right\} ## 1, 2
\left( -\infty, 3 \right] ## x \leq 3
\left[ -\frac{1}{2}, \frac{1}{2} \right] ## -\frac12 \le x \le \frac12
x^4 + 4x^2 + 4 ## (x^2+2)^2
-3 < x < 5 ## (-3, 5)
(3, \frac{\pi}{2}) ## (3,\pi/2)
\left( 3, \frac{\pi}{2} \right) ## (3, 0.5\pi)
2516_8 ## 2516_{8}
110011_2 ## 110011
\frac{3}{8}x ## 3x/8
5 \text{ hours } ## 5 \text{ hours}
1 \frac{1}{2} \text{ hours} ## 1.5 \text{ hours}
1\frac{1}{2}\text{ hours} ## 90 \text{ minutes}
150 \text{ cents} ## \$1.50
0.5 \text{ m} ## 50 \text{ cm}
3600 ## 3,600 \text{ seconds}
75\% ## \frac{3}{4}
\frac{3}{4} ## 75\%
1.25 ## 125\%
33\frac{1}{3}\% ## 33\frac13
1/3 ## 33\frac{1}{3}\%
5\sqrt{3} \text{ cm}^2 ## 5\sqrt3
\pi \text{ radians} ## 180^\circ
45^\circ ## \frac{\pi}{4}
\tan 45^\circ + 1 ## 2
2\sin 30^\circ ## 1
\sin^2 30^\circ ## \frac14
\cos(30^\circ) ## \frac{\sqrt{3}}{2}
\sec 60^\circ ## 2
\frac{1}{\sin 30^\circ} ## 2
\sqrt{-9} ## 3i
(1+i)^2 ## 2i
\frac{1}{i} ## -i
i^{4} ## 1
\operatorname{Re}(z) ## \operatorname{Re}(z)
5 ## 5\text{ units}
(x,y)=(1,2) ## (1,2)
(1,2) ## (x,y)=(1,2)
\begin{cases} x=1 \\ y=2 \end{cases} ## \begin{cases} x=1 \\ y=2 \end{cases}
x+2y+3=0 ## 2x+4y+6=0
y-2=3(x-1) ## y=3x-1
\frac{x^2}{4}+\frac{y^2}{9}=1 ## 9x^2+4y^2=36
10,20,30 ## 10, 20, 30
1,000 and 2,000 ## 1000, 2000
\{1000,2000\} ## 1,000 and 2,000
-1, 0, 1 ## 0, 1, -1
\{-1,0,1\} ## \{0, \pm 1\}
\emptyset ## \varnothing
\text{None} ## none
\text{DNE} ## DNE
2^{\frac{1}{2}} ## \sqrt{2}
8^{2/3} ## 4
27^{-1/3} ## \frac13
\log_3 27 ## 3
\ln(e^5) ## 5
\log 1000 ## 3
\lg 100 ## 2
e ## \exp(1)
C_5^2 ## C_5^2
P(A) = \frac{1}{3} ## \frac13
a_n = 2n+1 ## 2n+1
f^{-1}(x) = x-1 ## x-1
12 \times 10^3 ## 12000
1.2e4 ## 12 thousand
-2.5 ## -2\frac12
-2\frac12 ## -\frac{5}{2}
0.2\overline{7} ## \frac{5}{18}
3.\overline{14} ## \frac{311}{99}
\sqrt{\frac{1}{2}} ## \frac{\sqrt2}{2}
\sqrt{7+4\sqrt{3}} ## 2+\sqrt{3}
\sqrt[3]{-8} ## -2
x \in [2,3) ## 2 \le x < 3
\mathbb{R} ## x \in \mathbb{R}
\mathbb{R} ## (-\infty, \infty)
\{x : x > 2\} ## x>2
x > 2 ## x \in (2, \infty)
k \ge \frac{3}{2} ## k \geq 1.5
a<b ## b>a
120 ## 5!=120
x^2y ## x**2y
\{x \mid x \ne 2\} ## x != 2
£5 ## 5 pounds
1,450 ## x = 1,450
(-3, 100\pi) ## (-3,100\pi)
(-3,100) ## (-3, 100)
A_{1} ## A_1
\boxed{5} ## 5
5 ## 5 cm
7 ## \boxed{7}
\frac{5}{2} ## 2 1/2
\frac{11}{4} ## 2\ \frac{3}{4}
12.75 ## 12 3/4
5/3 ## 1.\overline{6}
0.\overline{12} ## \frac{4}{33}
\frac{4}{33} ## .\overline{12}
(-\infty,5) ## y < 5
[0,5) ## 0 ≤ x < 5
(-\infty,0]\cup[4,\infty) ## x\le0 \text{ or } x\ge4
(-\infty,0]\cup[4,\infty) ## x \leq 0 \cup x \geq 4
x \geq 5 ## [5, \infty)
n > 4 ## n>4
1+2i ## 1 + 2 i
\frac{\sqrt{2}}{2}+\frac{\sqrt{2}}{2}i ## e^{i\pi/4}
7000000 ## 7 million people
4500 ## 4.5 thousand
450000 ## 450 thousand dollars
\text{3 million} ## 3000000
3 ## 3 \pmod{4}
1 ## 1 (mod 3)
1 \pmod{3} ## 4 \pmod{3}
25\% ## 25 percent
25\% ## 0.25
\frac{1}{4} ## 25%
20 ## 20%
8.5 ## 8.5\%
1F_{16} ## 31_{10}
1010_2 ## (1010)_2
1010_{two} ## 1010_2
12:00 ## 12:00
7:05 ## 7:05 AM
3:4 ## 6:8
3:4 ## 0.75
5:3:2 ## 10:6:4
2.5 m ## 250 cm
3 hours ## 180 min
500 g ## 0.5 kg
2 liters ## 2000 ml
1/2 hour ## 30 minutes
4 weeks ## 28 days
2 years ## 24 months
60 \text{ km/hr} ## 60 km/h
12 \text{ sq ft} ## 12 \text{ ft}^2
64 in^3 ## 64 cubic inches
\$3.50 ## 3.5
\$3.50 ## 3.50 dollars
75 cents ## 75
€20 ## 20 euros
17 \text{ marbles} ## 17 marbles
17 ## 17 students
\overline{PQ} ## PQ
\{2,4,6\} ## \{6,4,2\}
2,4,6 ## 2, 4, and 6
(2,-1) ## (2, -1)
(2,-1) ## \left(2,-1\right)
(2,-1) ## x=2,\ y=-1
(1,2),(3,4) ## (3,4) \text{ and } (1,2)
\left(\frac{1}{3}, 0\right) ## (1/3, 0)
\begin{bmatrix} 2 & 0 \\ 0 & 2 \end{bmatrix} ## 2\begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix}
\text{Wednesday} ## wednesday
D ## \text{D}
D ## (D).
\text{isosceles} ## Isosceles
3x^2-2x+1 ## 1-2x+3x^2
\frac{x}{x+1} ## 1-\frac{1}{x+1}
2(x+3) ## 2x+6
\sqrt{12} ## 2\sqrt{3}
3^{-2} ## \frac{1}{9}
\log_4 16 ## 2
\frac{\ln 8}{\ln 2} ## 3
\cos^2\theta ## 1-\sin^2\theta
y = -\frac{2}{3}x + 4 ## y = 4 - \frac{2x}{3}
C = 2\pi r ## 2\pi r
S = \frac{n(n+1)}{2} ## \frac{n^2+n}{2}
-7 ## - 7
-7 ## (-7)
1e-3 ## 0.001
2.0 ## 2
\infty ## +\infty
3.14159265358979 ## \pi
"""

WRONG = r"""
i ## \sqrt{-1}
-1 ## i^2
-i ## i^3
2i ## \sqrt{-4}
5 ## (2+i)(2-i)
-1 ## e^{i\pi}
\frac{1}{2} ## \sin 30^\circ
1/2 ## \sin(30^\circ)
1/2 ## \cos 60^{\circ}
1 ## \tan 45°
\frac{\sqrt{3}}{2} ## \sin 60^\circ
\frac{1}{2} ## \sin\frac{\pi}{6}
2 ## 7 \mod 5
1024 ## 2^10
8 ## 2³
10 ## \binom{5}{2}
6 ## \sum_{k=1}^{3} k
720 ## (3!)!
252 ## \binom{10}{5}
3 ## \log_2 8
1 ## \ln e
\frac{1}{2} ## \int_0^1 x\,dx
2 ## \sqrt[3]{8}
3 ## |-3|
2 ## \lfloor 2.5 \rfloor
1 ## \sin 90^{\circ}
3 ## 10 \bmod 7
8 ## 2^3
6 ## 3!
6 ## 3\cdot2
-1 ## \cos \pi
\frac{\sqrt{2}+\sqrt{6}}{4} ## \cos 15^\circ
1450 ## \frac{2 \cdot 1,450}{2}
5i ## \sqrt{-25}
25 ## |3+4i|^2
-4 ## (2i)^2
\frac{1}{2} ## \cos(60°)
\sqrt{3} ## \tan 60^\circ
-\frac{1}{2} ## \cos 120^{\circ}
0 ## \sin 180^\circ
120 ## 2 \text{ hundred} - 80
3 ## 7 \pmod 4
0 ## 1-1
0 ## 1e1000001
1 ## 1e99999999
0 ## 1e-99999999
18 ## 18_8
18 ## 18_{2}
18 ## 18_a
4210_5 ## 4210_6
4210_5 ## 4211_5
4210_5 ## 4210_{10}
4210_5 ## 421
101_2 ## 101_3
6:30 ## 7:35
6:30 ## 6:35
6:30 ## 3:15
6:30 ## 1/5
6:30 ## 6:30:30
6:30 \text{ a.m.} ## 6:30 \text{ p.m.}
1:2 ## 2:1
1:2:3 ## 1:6:1
1:2 ## 1:2:3
1:2 ## 2
5 m ## 5 cm
5 \text{ m} ## 5 \text{ cm}
5 \text{ cm} ## 5 \text{ cm}^2
5 \text{ cm} ## 5 \text{ mm}
5 \text{ kg} ## 5 \text{ g}
5 \text{ kg} ## 5 \text{ lb}
5 \text{ hours} ## 5 \text{ minutes}
5 \text{ hours} ## 5 \text{ days}
5 miles ## 5 km
5 miles ## 5 miles per hour
60 mph ## 60 \text{ km/h}
5 dollars ## 5 euros
\$5 ## 5 \text{ euros}
\$5 ## €5
\$5 ## 5 cents
\$5 ## \$6
5 apples ## 5 oranges
5 \text{ apples} ## 5 \text{ oranges}
1 m ## 10 cm
1 hour ## 100 minutes
1 m ## 100
5 \text{ ft} ## 5 \text{ in}
30^\circ ## 30 \text{ radians}
30^\circ ## 31^\circ
\sin 30^\circ ## \sin 30
\frac12 ## \sin 30
90^\circ ## \pi
90 ## \frac{\pi}{2}
20^\circ C ## 20^\circ F
50 ## 0.5
0.5 ## 50
50\% ## 5\%
50\% ## 0.05
0.5\% ## 50\%
5 ## 0.05
5\% ## 0.5
100 ## 1
5 ## 5 million
5 ## 5 thousand
1000000 ## 1 billion
[2,5) ## [2,5]
(2,5) ## [2,5]
(2,5) ## \{2,5\}
\{2,5\} ## (2,5)
\{2,5\} ## [2,5]
[2,5] ## \{2,5\}
\{1,2,3\} ## (1,2,3)
(2,5) ## (5,2)
(3,5) ## 5,3
(1,2,3) ## (3,2,1)
(1,2) ## (1,2,3)
1,2 ## 1,2,3
1,2,3 ## 1,2
5,6 ## 5,5,6
(0.0000001,2) ## (0.0000002,2)
(-\infty,2) ## x>2
(-\infty,2) ## x \le 2
(-\infty,2] ## x<2
(1,3) ## 1 \le x \le 3
(1,3) ## 1<x<4
(1,3) ## x<3
[1,3) ## 1 < x \le 3
x<2 ## x>2
x<2 ## x \le 2
x<2 ## 2<x
2 ## x<2
2 ## x>2
x=2 ## x>2
x \neq 2 ## 2
(-\infty,1)\cup(3,\infty) ## 1<x<3
(-\infty,1)\cup(3,\infty) ## x<1
i ## -i
i ## 1
1 ## i
-1 ## i
2+3i ## 2-3i
2+3i ## 3+2i
2+3i ## 5
i^2 ## 1
3/2 ## 1 1/3
3/2 ## 11/2
11/2 ## 1 1/2
1/2 ## 1 1/2
-3/2 ## 1 1/2
1/3 ## 0.3
1/3 ## 0.333
0.33 ## 1/3
1/3 ## 0.\overline{4}
1/3 ## 0.\overline{03}
0.\overline{3} ## 0.3
\pi ## 3.14
\pi ## 3.1416
\pi ## 22/7
\sqrt{2} ## 1.414
2/3 ## 0.67
2^{2017} ## 2^{2017}-1
10^{200}+1 ## 10^{200}
10^{50} ## 10^{50}+1
2 \pmod 5 ## 3 \pmod 5
2 \pmod 5 ## 2 \pmod 7
2 ## 3 \pmod 5
2 ## 2 \pmod 5 + 1
3 \pm 2 ## 3 + 2
3 ## \pm 3
\pm 3 ## 3
\pm 3 ## \pm 4
1,-1 ## 1
\begin{pmatrix}1&2\\3&4\end{pmatrix} ## \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} ## \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} ## \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} ## 1
listen ## silent
\text{listen} ## silent
Amy ## May
Amy ## \text{May}
Monday ## Tuesday
A ## B
A ## AB
\text{A} ## \text{C}
B ## D
ABC ## ACB
\text{yes} ## \text{no}
\text{odd} ## \text{even}
x=2 ## y=2
y=2x+1 ## y=2x-1
y=2x+1 ## x=2y+1
y=2x ## 2y=x
x+y=3 ## x-y=3
x+y=3 ## 3
2x - 3y = 4 ## 4
x^2+1 ## x^2-1
-5 ## 5
5 ## -5
-\frac12 ## \frac12
1/2 ## 2/1
1/2 ## 1/3
2/3 ## 3/2
12.5 ## 125
0.5 ## 5
1,234 ## 1.234
1000 ## 1,0000
210 ## 2**10
210 ## 2^{10}
20 ## 2^0
2t ## 2
2m ## 2
5m ## 5n
5x ## 5
2ab ## 2
5 ## not 5
5 ## 5 or more
5 ## 5 \text{ or more}
5 ## 5 \text{ and a half}
5 ## five or six
5 ## 3, 4, 5
5 ## \text{between 4 and 5}
12 ## 12 \text{ or } 13
AB ## CD
\overline{AB} ## \overline{CD}
\overline{z} ## z
x ## -x
e ## \pi
2.718 ## e
0 ## \emptyset
\infty ## -\infty
\infty ## 10^{100}
1 ## \frac{0}{0}
x_1 ## x_2
a_{10} ## a_{11}
\log_2 8 ## \log_3 8
\sqrt{2} ## \sqrt[3]{2}
2^3 ## 3^2
5! ## 5
24 ## 5!
(x+1)^2 ## x^2+1
\frac{x}{y} ## \frac{y}{x}
0.1 ## 0.01
3.0 ## 30
123456789 ## 123456788
0.123456 ## 0.123457
1e5 ## 1e6
5 ## 5e1
7 ## 07:00
C ## (D) 12
\frac{1}{2} ## \frac{1}{3}
\sqrt{3}/3 ## \sqrt{3}
(x-2)(x+3) ## (x-3)(x+2)
(0,1),(2,3) ## (1,0),(2,3)
(0,1),(2,3) ## (0,2),(1,3)
\{(0,1),(2,3)\} ## (0,1,2,3)
3\frac{1}{2} ## \frac{3}{2}
2\pi ## 2
x \ge 0 ## (0,\infty)
[-2,2] ## -2< x\leq 2
(2,\infty) ## (-\infty,2)
30\% ## 3
120 ## 12^{\circ}
f(x)=x^2 ## 2x
x=\pm 2 ## 2
1 \pm \sqrt{5} ## 1+\sqrt{5}
\{1, 2, 3\} ## 1,2
1,2,3 ## 1,2,4
2^n ## 2n
\binom{n}{2} ## \binom{n}{3}
-1+2i ## 1-2i
|3+4i| ## 7
\cos 120^\circ ## \frac12
\cos 120 ## -\frac12
0.1\overline{6} ## 0.\overline{16}
2.\overline{6} ## 2.6
1011_2 ## 1011_3
1011_2 ## 1101_2
4:30 ## 4:31
4:30 ## 5:30
4:30 ## 9:00
4:30 am ## 4:30 pm
2:3 ## 3:2
2:3 ## 2/5
3 \text{ m} ## 3 \text{ km}
1 kg ## 100 g
5 \text{ m} ## 5 \text{ s}
5 \text{ m/s} ## 5 \text{ m}
5 \text{ m/s} ## 5 \text{ km/h}
5 \text{ m}^2 ## 5 \text{ m}^3
5 \text{ million} ## 5 \text{ billion}
x \equiv 3 \pmod 7 ## x \equiv 3 \pmod 8
8 ## 3^2
2^{100} ## 2^{101}
2^{100} ## 2^{100}+1
6 ## 3
\overline{CD} ## \overline{CE}
42 ## -42
42 ## 4.2
42 ## 420
42 ## 24
42 ## 42x
42 ## 42+1
42 ## x < 42
42 ## \neq 42
42 ## 42 or 43
42 ## not 42
42 ## 41 < x < 43
42 ## 42/2
42 ## \sqrt{42}
42 ## 42!
42 ## 42^2
42 ## \{42, 43\}
42 ## (42, 42)
42 ## 42\%\%x
\text{five} ## six
\text{True} ## false
\text{blue} ## green
\text{Tom} ## \text{Mot}
x ## 2x
x ## x^2
x+y ## x-y
xy ## x+y
a^b ## b^a
\sin x ## \cos x
\sin x ## \sin 2x
\ln x ## \log_2 x
e^x ## e^{-x}
10^{-6} ## 10^{-7}
6.02e23 ## 6.02e24
6.02e23 ## 6.03e23
\frac{1}{7} ## 0.1428
\infty ## 0
\text{A} ## \text{A, B}
\text{A, B} ## \text{A}
1 \text{ and } 2 ## 1
\begin{bmatrix}1&0\\0&1\end{bmatrix} ## \begin{bmatrix}1&1\\0&1\end{bmatrix}
\begin{bmatrix}1&0\\0&1\end{bmatrix} ## 1
\langle 1,2,3\rangle ## (3,2,1)
\langle 1,2\rangle ## 1
x \in [1,3] ## x \in (1,3)
y=2 ## x=2
x=1,y=2 ## x=2,y=1
(1,2) ## x=2,y=1
1 ## 0.999
1 ## 1.000001
1 ## 0.9999999
100 ## 99.999999
2 ## 2i
5 cm ## 5 inches
5 ## 5,5
\$5 ## £5
0.5 ## 0.5\%
0.1 ## 0.1\%
5 ## 5 squared
25 ## 5 squared cm
5 ## 5 millions
5 ## 5 tenths
5 ## 5 halves
5 ## 5 lakh
5 ## \text{at least } 5
5 ## \text{at most } 5
5 ## \text{less than } 5
5 ## at most 5
5 ## more than 5
5 ## less than 5
5 ## not equal to 5
5 ## minus 5
5 ## 5 minus 1
5 ## \frac{1}{5}
5 ## 1/5
5 ## 5/5
5 ## 5_6 + 1
\{-1,0,1\} ## \{0, 1\}
(x,y)=(1,2) ## (2,1)
(1,2) ## (2,1)
x+2y+3=0 ## x+2y-3=0
y=3x-1 ## y=3x+1
2516_8 ## 2516_{9}
2516_8 ## 2517
2:00 \text{ p.m.} ## 2:00 AM
2:00 \text{ p.m.} ## 3:00 PM
-3 < x < 5 ## (-3, 5]
-3 < x < 5 ## [-3, 5]
-3 < x < 5 ## -3 \le x \le 5
x \in [2,3) ## 2 < x < 3
x > 2 ## x \ge 2
x > 2 ## x > 3
x > 2 ## (2, 3)
k \ge \frac{3}{2} ## k \ge \frac{2}{3}
a<b ## a>b
\frac{-1 \pm i\sqrt{3}}{2} ## \frac{-1+i\sqrt3}{2}
\frac{-1 \pm i\sqrt{3}}{2} ## \frac{1 \pm i\sqrt{3}}{2}
\sqrt{4} ## \pm 2
\sqrt{7+4\sqrt{3}} ## 2-\sqrt{3}
\cos 15^\circ ## \cos 15
\cos 15^\circ ## \cos 75^\circ
45^\circ ## \frac{\pi}{3}
45^\circ ## 45 \text{ rad}
\pi \text{ radians} ## \pi^\circ
1.25 ## 12.5\%
75\% ## 7.5\%
3600 ## 3,600,000
1.2e4 ## 1.2 thousand
1\frac{1}{2}\text{ hours} ## 1\frac12 \text{ minutes}
1\frac{1}{2}\text{ hours} ## 60 \text{ minutes}
150 \text{ cents} ## \$150
150 \text{ cents} ## \$15
100, 200 ## 100200
1,000 and 2,000 ## 1, 2
-2\frac12 ## 2\frac12
-2\frac12 ## -\frac{3}{2}
7!! ## 5040
\sqrt{-9} ## 3
\sqrt{-9} ## -3
(1+i)^2 ## 2
\frac{1}{i} ## i
\operatorname{Re}(z) ## \operatorname{Im}(z)
\text{None} ## \text{some}
\text{north} ## \text{thorn}
\text{(A)} ## \text{(B)}
A, B ## A, C
ABCD ## ABDC
PQ ## PR
P ## Q
\alpha ## \beta
\frac{x^2}{4}+\frac{y^2}{9}=1 ## \frac{x^2}{9}+\frac{y^2}{4}=1
x^2 + y^2 = 4 ## x^2 + y^2 = 2
x^2 + y^2 = 4 ## 4
4 ## x^2-y^2 \ne 4
10^{-3} ## 10^{3}
0.2\overline{7} ## 0.\overline{27}
3.14159 ## \pi
3.14159 ## 3.1416
2.7 ## 2.70001
99 ## 99.5
1 \text{ km}^2 ## 1000 \text{ m}^2
1 \text{ m}^3 ## 100 \text{ cm}^3
1 \text{ ft} ## 1 \text{ m}
1 \text{ pound} ## 1 \text{ dollar}
5 \text{ boys} ## 5 \text{ girls}
12 \text{ inches} ## 12 \text{ feet}
3 \text{ days} ## 3 \text{ weeks}
32^\circ F ## 32^\circ C
10 \text{ N} ## 10 \text{ J}
7 \text{ V} ## 7 \text{ A}
(5, 0) ## 5
(5, 0) ## [5, 0]
(-3,100\pi) ## -3100\pi
3100 ## (3,100)
24 ## 5!=120
A_1 ## A_2
\frac{5}{2} ## 2 1/3
12.75 ## 12 4/3
5/3 ## 1.6
0.\overline{12} ## 0.12
(-\infty,5) ## y \le 5
[0,5) ## 0 < x \le 5
(-\infty,0]\cup[4,\infty) ## 0\le x\le4
(-\infty,0]\cup[4,\infty) ## x<0 \text{ or } x>4
x \geq 5 ## x \ge 6
n > 4 ## n<4
1+2i ## 1-2i
5i ## 5
-4 ## 4i
\frac{1}{2} ## \cos 60
\frac{1}{2} ## \sin 60^\circ
7000000 ## 7 billion
7 ## 7 million
3 ## 4 \pmod{4}
3 ## 8 \pmod 4
25\% ## 2.5
25\% ## 0.025
25\% ## 2500\%
1F_{16} ## 32_{10}
1010_2 ## 1010_3
12:00 ## 0:12
7:05 ## 7:50
7:05 AM ## 7:05 PM
3:4 ## 4:3
3:4 ## 4/3
5:3:2 ## 5:2:3
2.5 m ## 2.5 cm
2.5 m ## 25 cm
3 hours ## 3 minutes
500 g ## 500 kg
4 weeks ## 4 days
60 km/h ## 60 m/s
12 \text{ ft}^2 ## 12 \text{ ft}
12 \text{ ft}^2 ## 12 \text{ ft}^3
\$3.50 ## €3.50
\$3.50 ## \$35
75 cents ## 75 dollars
17 \text{ marbles} ## 17 \text{ boxes}
\overline{PQ} ## \overline{PR}
\{2,4,6\} ## \{2,4\}
\{2,4,6\} ## (2,4,6)
2,4,6 ## 2,4,8
(2,-1) ## (-1,2)
(2,-1) ## [2,-1]
(2,-1) ## \{2,-1\}
[1,4] ## (1,4)
[1,4] ## [1,4)
[1,4] ## 1,4
\begin{bmatrix} 2 & 0 \\ 0 & 2 \end{bmatrix} ## \begin{bmatrix} 2 & 0 \\ 2 & 0 \end{bmatrix}
\begin{bmatrix} 2 & 0 \\ 0 & 2 \end{bmatrix} ## 2
\text{Wednesday} ## Thursday
D ## A
D ## \text{none of these}
\text{dusty} ## \text{study}
stop ## pots
3x^2-2x+1 ## 3x^2+2x+1
2(x+3) ## 2x+3
3^{-2} ## -9
y = 2x ## y = 3x
y = 2x ## x = 2y
0 ## 10^{-8}
-7 ## 7
\infty ## \text{undefined}
3.14159265358979 ## 3.14
1/3 ## 0.3333
100 ## 1\%
4 ## \pm 4
\pm 4 ## 4
9 ## 3^{2^{1}}+1
10 ## 1010
10 ## 10_2 + 0
8 ## 8 \text{ or } 9
8 ## 7 < x < 9
8 ## -8
8 ## 88
8 ## 8 : 9
8 ## 8^\circ 30'
30^\circ ## 30'
"""
