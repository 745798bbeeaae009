"""`math` on the final answer as a text states it: how it is written, what surrounds it, and what
denies it."""

import pytest

from distflow.rewards.math.reward import compute_score

RIGHT = r"""
7 ## The answer is __7__.
7 ## The answer is _7_
7 ## The answer is ___7___.
7 ## The answer is *7*
7 ## The answer is ***7***.
7 ## The answer is `7`.
7 ## _The answer is 7._
7 ## **The answer is _7_**
7 ## The answer is "7".
7 ## The answer is “7”.
7 ## The answer is <b>7</b>.
7 ## The answer is <strong>7</strong>
7 ## The answer is <span style="color: red">7</span>.
7 ## <p>The answer is <em><u>7</u></em>.</p>
7 ## <div>7</div>
7 ## So she has <b>7</b> apples.
7 ## So she has __7__ apples.
7 ## So she has *7* apples.
7 ## The answer is&nbsp;7.
7 ## #### __7__
7 ## #### <b>7</b>
7 ## #### **7**
7 ## \boxed{__7__}
7 ## \boxed{*7*}
7 ## \boxed{<b>7</b>}
7 ## \boxed{`7`}
7 ## \boxed{"7"}
-7 ## The answer is <b>-7</b>.
-7 ## The answer is __-7__.
1000 ## The answer is <b>1,000</b>.
3.5 ## The answer is _3.5_.
1/2 ## The answer is <code>1/2</code>
18 ## The answer is **$18**.
18 ## The answer is <b>$18</b>.
4210_5 ## \boxed{4210_5}
x^2 ## The answer is x<sup>2</sup>.
1024 ## \boxed{1024_{10}}
7 ## The answer is 7 (seven).
7 ## The answer is 7 (apples).
7 ## The answer is **7** (seven).
7 ## The answer is 7 (since 3 + 4 = 7).
7 ## The answer is 7 (not 8).
7 ## The answer is 7 [seven].
7 ## So there are 7 (seven) apples
7 ## So 3 + 4 is 7 (seven)
18 ## She makes $18 (9 * 2).
18 ## She makes $18 (= 9 * 2).
18 ## The answer is 18 (9 + 9).
18 ## The answer is $18$ (dollars).
7 ## #### 7 (seven)
7 ## #### 7 (apples)
7 ## \boxed{7 (seven)}
7 ## \boxed{7 \text{ (seven)}}
7 ## \boxed{7\ (\text{seven})}
7 ## \boxed{7 (apples)}
7 ## $7$ (seven)
1/2 ## The answer is 1/2 (0.5).
1/2 ## The answer is 1/2 (50%).
1/2 ## The answer is 1/2 (one half).
1/3 ## The answer is 1/3 (≈ 0.333).
0.5 ## The answer is 0.5 (exactly)
5 cm ## The answer is 5 (cm).
(1, 2) ## The answer is (1, 2) (the vertex).
5000 ## \boxed{5 (thousand)}
2 \pmod 5 ## The answer is 2 (mod 5).
4210_5 ## \boxed{4210 (base 5)}
[1,3] ## The answer is [1, 3].
[1,3] ## The answer is the interval [1, 3].
[1,3] ## So the interval is [1, 3].
[1,3) ## The answer is [1, 3).
(1,3] ## The answer is (1, 3].
(1,3) ## The answer is (1, 3), since both ends are excluded.
(-\infty,3) ## The answer is (-inf, 3).
(-\infty,3] ## The answer is (-∞, 3].
[0,\pi] ## The answer is [0, pi].
[1,2]\cup[3,4] ## The answer is [1, 2] ∪ [3, 4].
[1,2]\cup[3,4] ## The solution is [1, 2] U [3, 4]
(1,3) ## x ∈ (1, 3)
\{1,3\} ## The answer is {1, 3}.
\{1,3\} ## The answer is \{1, 3\}.
\{1,2,3\} ## The answer is {3, 2, 1}.
1,3 ## The answer is 1, 3.
1,3 ## The answer is 1 and 3.
1,3 ## 1, 3
[1, 2, 3] ## [1, 2, 3]
[1, 2, 3] ## The sorted list is [1, 2, 3].
(1,2) ## The point is (1, 2).
(1, 2, 3) ## The answer is (1, 2, 3).
(0.5,-2) ## The answer is (0.5, -2).
(\frac12,\frac34) ## The answer is (1/2, 3/4).
2,3 ## The answer is x = 2 or x = 3.
(2,3) ## The answer is x = 2, y = 3.
x<2 ## The answer is x < 2.
1<x<3 ## The answer is 1 < x < 3.
[2,\infty) ## The answer is x >= 2.
-2\pi ## -2*pi
-2\pi ## The answer is -2*pi.
-2\pi ## The answer is -2π.
-2*pi ## The integral is -2*pi.
2\pi ## The answer is 2 pi.
2\pi ## So the area is 2π.
\pi/2 ## pi/2
\pi/2 ## The answer is pi/2.
\pi/2 ## The answer is π/2.
\pi/2 ## So the angle is pi/2.
\pi/2 ## So the angle is pi/2 radians.
\frac{3\pi}{4} ## The answer is 3pi/4.
\frac{3\pi}{4} ## The answer is 3*pi/4.
\pi ## The answer is pi.
\pi+1 ## The answer is pi + 1.
-1 + exp(16) ## -1 + exp(16)
-1 + exp(16) ## The answer is -1 + exp(16).
-1 + exp(16) ## The answer is exp(16) - 1.
-1 + exp(16) ## \boxed{e^{16} - 1}
e^{16}-1 ## The answer is e^16 - 1.
e^{16}-1 ## \boxed{-1 + exp(16)}
\sqrt{2} ## The answer is sqrt(2).
2\sqrt{3} ## The answer is 2*sqrt(3).
2\sqrt{3} ## The answer is 2 sqrt(3).
1+\sqrt{2} ## So the length is 1 + sqrt(2).
\ln 2 ## The answer is ln(2).
\frac{\sqrt{2}}{2} ## The answer is sqrt(2)/2.
3+4i ## The answer is 3 + 4i.
3+4i ## 3 + 4i
3+4i ## The answer is 3+4i
3+4i ## So z is 3 + 4i.
3+4i ## The answer is z = 3 + 4i.
3-4i ## The answer is 3 - 4i.
4i ## The answer is 4i.
-1-2i ## The answer is -1 - 2i, as required.
1+i ## The answer is 1 + i.
i ## The answer is $i$.
\infty ## The answer is infinity.
\infty ## The answer is oo.
x^2+1 ## The answer is x^2 + 1.
2x+3y ## The answer is 2x + 3y.
\frac{1}{2} ## The answer is \frac{1}{2}
3.5 ## \boxed{7/2}
0.75 ## \boxed{\frac{3}{4}}
7 ## \boxed{\frac{14}{2}}
19.5 ## \boxed{39/2}
0.6 ## \boxed{60/100}
0.25 ## \boxed{30/120}
\frac{1}{3} ## \boxed{20/60}
2.5 ## \boxed{250/100}
78 ## \boxed{936/12 = 78}
78 ## The answer is 936/12 = 78.
78 ## 936/12 = 78
7 ## I don't know, but the answer is 7.
7 ## I am not sure, but the answer is 7.
7 ## It is not easy. The answer is 7.
7 ## It does not matter, the answer is 7.
7 ## I don't think it is 8. The answer is 7.
7 ## The answer is 7. I don't think the answer is 8.
7 ## I don't think the answer is 8, so the answer is 7.
7 ## The answer is 7; it is wrong that the answer is 8.
7 ## Do not think the answer is 8. It is 7.
7 ## The number of incorrect items is 7.
7 ## The answer is definitely 7.
7 ## It is not 8 but 7.
7 ## The answer isn't 8; it's 7.
7 ## 8 is not the answer, 7 is.
7 ## 8 is wrong. It is 7.
7 ## The answer is not \boxed{8}, it is \boxed{7}
7 ## \boxed{7}. I doubt that it is \boxed{8}
7 ## No doubt: the answer is 7.
13 ## 7 less than 20 is 13.
13 ## The answer is 7 less than 20, so the answer is 13.
7 ## She has 7 more than he does.
7 ## How many? 7
7 ## The answer is 7, which is less than 20.
7 ## She needs at least 7 eggs.
\sqrt{2} ## \boxed{1.414214}
\sqrt{2} ## \boxed{1.41421356}
\pi ## \boxed{3.141593}
\frac{2}{3} ## \boxed{0.666667}
\sqrt{7} ## \boxed{\sqrt{7} \approx 2.646}
7 ## Final answer: <b>7</b>
7 ## **Final Answer:** __7__
7 ## The answer is <font color="red">7</font> apples.
7 ## The answer is _**7**_.
7 ## Answer: ~7
7 ## So we get _7_.
7 ## <answer><b>7</b></answer>
7 ## <answer>7 (seven)</answer>
7 ## <answer> **7** </answer>
2\pi ## <answer>2*pi</answer>
[2,5) ## <answer>[2, 5)</answer>
3-2i ## <answer>3 - 2i</answer>
42 ## The final answer is 42 (forty-two).
42 ## Thus, x = 42 (as required).
42 ## The answer is 42 (forty two) apples.
42 ## The answer is $42 (forty-two dollars).
42 ## \boxed{42 \, (\text{apples})}
42 ## \boxed{42\text{ (approximately)}}
42 ## \boxed{42 (approx.)}
42 ## The answer is 42 (rounded).
42 ## The answer is 42 (from step 3).
42 ## The answer is 42 (see above).
42 ## The answer is 42 [see above].
1/2 ## \boxed{\frac12 (0.5)}
(2,5) ## So the open interval is (2, 5).
(-1, 4] ## The solution set is (-1, 4].
[-3, -1] ## The answer is [-3, -1]
[-3,-1] ## The range is [-3, -1] because f is decreasing.
(-\infty, -2) \cup (2, \infty) ## The answer is (-∞, -2) ∪ (2, ∞).
(-\infty, -2) \cup (2, \infty) ## The answer is (-oo, -2) U (2, oo)
(-\infty, -2) \cup (2, \infty) ## The answer is x < -2 or x > 2.
2, 3, 5 ## The answer is 2, 3 and 5.
2,3,5 ## The answers are 2, 3, 5.
\{2,3,5\} ## The set is {2, 3, 5}.
[1,2,3] ## The answer is: [1, 2, 3]
[1.5, 2.5] ## The answer is [1.5, 2.5]
(1,-2,3) ## The vector is (1, -2, 3).
(a,b) ## The answer is (a, b).
-2\pi ## The answer is: -2 * pi
-\pi/2 ## The answer is -pi/2.
-\pi/2 ## The value is -π/2.
\frac{\pi}{6} ## So theta = pi/6.
\frac{5\pi}{6} ## So theta is 5*pi/6 radians.
\pi^2/6 ## The answer is pi^2/6.
\pi^2/6 ## The sum is pi^2/6.
\pi^2/6 ## pi**2/6
4\pi ## The area is 4π square units.
4\pi ## The area is 4 pi square units.
e ## The answer is e.
e^2 ## The answer is e^2.
e^2 ## The limit is e^2.
2e ## The answer is 2e.
2*e ## The answer is 2*e.
\ln 2 ## The integral is ln(2).
1-\ln 2 ## The answer is 1 - ln(2).
\sqrt{3}/2 ## The ratio is sqrt(3)/2.
-1 + exp(16) ## The integral is -1 + exp(16).
exp(2)-exp(1) ## The answer is exp(2) - exp(1).
2*cos(1) ## The answer is 2*cos(1).
5\sqrt{2} ## The distance is 5√2.
5\sqrt{2} ## The answer is 5√2 units.
2+3i ## The root is 2 + 3i.
2+3i ## The root is 2+3i, and its conjugate is not needed.
-i ## The answer is -i.
5i ## So z = 5i
1/2+i/2 ## The answer is 1/2 + i/2.
3+4i ## The answer is 3 + 4*i.
3+4i ## The answer is (3 + 4i).
3+4i ## The answer is 3 + 4 i.
x+1 ## The answer is x + 1.
3x^2 ## The answer is 3*x**2.
10 ## I am sure the answer is 10.
10 ## I have no doubt the answer is 10.
10 ## There is no doubt that the answer is 10.
10 ## Without a doubt, the answer is 10.
10 ## Don't forget that the answer is 10.
10 ## We cannot simplify further, so the answer is 10.
10 ## It is not hard to see that the answer is 10.
10 ## We can not be wrong: the answer is 10.
10 ## It's not 9. The answer is 10.
10 ## Not surprisingly, the answer is 10.
10 ## I can't believe it was that easy, the answer is 10.
10 ## You may think the answer is 9, but it is not. The answer is 10.
10 ## 9 is not the answer. 10 is.
10 ## The answer is not 9, it is 10.
10 ## The answer is 10, not 9.
10 ## The answer is 10 and nothing else.
10 ## The answer is no more than 10, namely 10
10 ## The answer is exactly 10.
10 ## If x is not 0 the answer is 10.
10 ## Since 9 is not prime the answer is 10.
10 ## The sum is 10, which is not prime.
10 ## She does not have 12 but 10.
10 ## It isn't 12, 11 or 9; it's 10.
10 ## Nobody else came, so there are 10.
10 ## There were 3 less than 13, so 10.
10 ## There are 10 more apples than oranges.
10 ## He is 10 years older than she is.
10 ## 10 is the answer.
10 ## 10 is right.
10 ## 10 is the number of eggs that are not broken.
10 ## She has 10 eggs that are not broken.
10 ## I'm not 100% sure, but I'd say 10.
10 ## He made 2 mistakes and got the wrong change of 10.
10 ## The answer is 10 times.
10 ## The answer is 10 times larger.
10 ## It is wrong to say 9. The answer is 10.
10 ## \boxed{10} is the answer, not 9
10 ## I don't know why but \boxed{10}
10 ## We do not need more. \boxed{10}
10 ## It is not possible to have more, hence \boxed{10}
10 ## Not \boxed{9} but \boxed{10}
3.75 ## \boxed{15/4}
1.25 ## The answer is 5/4.
4 ## \boxed{8/2}
0.75 ## The answer is 75/100.
\frac{936}{48} ## \boxed{936/48}
3.142857 ## \boxed{22/7}
18 ## The answer is ~~17~~ 18.
18 ## The answer is 18<br>
18 ## \boxed{\$\,18}
1234567 ## The answer is 1_234_567.
1234567 ## The answer is 1'234'567.
1234567 ## So it has 1_234_567 inhabitants.
1/2 ## The answer is ½.
3/2 ## She ate 1½ pies.
1/2 ## 0.5 (or 1/2)
1/2 ## The answer is 0.5 (or 1/2).
1/2 ## The answer is 1/2 or 0.5.
1/2 ## The answer is 1/2, or 50%.
1/2 ## The answer is 1/2 (i.e. 50%).
1/2 ## \boxed{1/2 \text{ or } 0.5}
1/2 ## \boxed{\frac{1}{2} \text{ (or 0.5)}}
[1,3] ## 1 <= x <= 3
2, 3, 5 ## The primes are 2, 3, 5.
2, 3, 5 ## The primes are 2, 3, and 5.
2, 3, 5 ## The roots: **2, 3, 5**
2, 3, 5 ## The solutions are x = 2, x = 3, and x = 5.
(3, 5) ## The solution is x = 3, y = 5.
x^2+2x+1 ## f(x) = x^2 + 2x + 1
x^2+2x+1 ## The polynomial is x^2 + 2x + 1.
8:30 ## The train arrives at 8:30.
8:30 ## \boxed{8{:}30}
3:4 ## So the ratio of boys to girls is 3:4 here.
5 ## 5 apples, 5 in total.
5 ## In 2023, 5 people came.
237 ## So coach A spent $290-$53=$237 more than coach B
8 ## My wrong answer: 7. The right one is 8.
8 ## Some say the answer is 7, but that is wrong. It is 8.
8 ## The answer is 7. Wait, no, it is 8.
7 ## The answer is 7. Wait, let me check: 3 + 4 = 7. Yes.
7 ## If we add the 3 and the 4 then the answer is 7.
12 ## Final Answer: 12 ✅
12 ## The answer is 12 👍
12 ## The answer is 12 €.
12 ## The answer is 12 for n = 3.
12 ## The answer is 12. No, wait. I mean 12.
12 ## After 8, 9, 10 and 11 comes 12.
12 ## x = 9 and y = 3 gives x + y = 12
12 ## So she needs to buy 12 eggs at least.
12 ## If 3 fit in a box then he must fill 12 or more of them
12 ## She has 12 left, which is more than 10.
1,2 ## x_1 = 1, x_2 = 2
6\pi ## $6\pi$ cm$^2$
\sqrt{2} ## \boxed{2^{0.5}}
2\sqrt{5} ## 2*5**0.5
"""

WRONG = r"""
7 ## The answer is __8__.
7 ## The answer is <b>8</b>.
7 ## \boxed{<b>7</b> or <b>8</b>}
8 ## <s>8</s> 7
7 ## The answer is 8 (seven).
7 ## The answer is 8 (not 7).
7 ## The answer is 7 (or 8).
8 ## The answer is 7 (or 8).
7 ## \boxed{7 (or 8)}
7 ## \boxed{7 (8)}
7 ## \boxed{7 (wrong)}
7 ## \boxed{7 (squared)}
7 ## \boxed{7 (thousand)}
7 ## \boxed{7 (mod 5)}
5 m ## \boxed{5 (cm)}
5 m ## The answer is 5 (cm).
5 apples ## \boxed{5 (oranges)}
18 ## \boxed{18 (9 + 8)}
1/2 ## #### 1/2 (0.6)
17 ## The answer is 18 (9 + 8).
324 ## \boxed{18 (9 + 9)}
3 ## The answer is [1, 3].
1 ## The answer is [1, 3].
[1,3] ## The answer is (1, 3).
[1,3) ## The answer is [1, 3].
(3,1) ## The answer is (1, 3).
\{1,3\} ## The answer is (1, 3).
(1,3) ## The answer is {1, 3}.
[1,2] ## The answer is [1, 2] ∪ [3, 4].
3 ## The point is (2, 3).
2 ## The answer is x = 2 or x = 3.
2 ## The answer is x < 2.
x<2 ## The answer is x > 2.
-2 ## -2*pi
-2 ## The answer is -2*pi.
2 ## So the area is 2π.
-2\pi ## The answer is 2*pi.
\pi/2 ## The answer is pi/3.
2 ## The answer is pi/2.
\pi/2 ## So the angle is pi.
16 ## -1 + exp(16)
-1 ## The answer is -1 + exp(16).
-1 + exp(16) ## The answer is 1 + exp(16).
2 ## The answer is sqrt(2).
2 ## The answer is sqrt(4).
4 ## The answer is 3 + 4i.
3 ## The answer is 3 + 4i.
7 ## The answer is 3 + 4i.
3+4i ## The answer is 3 - 4i.
3+4i ## The answer is 3 + 4.
3+4i ## The answer is 3 + 4 i think.
7 ## The answer is 3 + 4.
7 ## 3 + 4
78 ## \boxed{936/12}
78 ## The answer is 936/12.
78 ## 936/12
78 ## \boxed{\frac{936}{12}}
78 ## \boxed{x = 936/12}
78 ## \boxed{936 \div 12}
78 ## \boxed{936/12 \text{ apples}}
78 ## #### 936/12
-78 ## \boxed{-936/12}
12 ## \boxed{84/7}
125 ## \boxed{1000/8}
37.5 ## \boxed{150/4}
100 ## \boxed{1000/10}
7 ## I don't think the answer is 7
7 ## I don't think the answer is 7.
7 ## I do not think that the answer is 7.
7 ## I don’t believe the answer is 7.
7 ## I doubt the answer is 7.
7 ## I doubt that the answer is 7.
7 ## I highly doubt the answer is 7
7 ## It is unlikely that the answer is 7.
7 ## It is false that the answer is 7.
7 ## It is not true that the answer is 7.
7 ## It would be wrong to say that the answer is 7.
7 ## I am not sure the answer is 7.
7 ## I'm not convinced that the answer is 7.
7 ## Nobody thinks the answer is 7.
7 ## I never said the answer is 7.
7 ## No way the answer is 7.
7 ## I cannot say the answer is 7.
7 ## I disagree that the answer is 7.
7 ## The wrong answer is 7.
7 ## An incorrect answer would be: the answer is not 7.
7 ## I don't think it is 7.
7 ## I don't think it's $7$.
7 ## I doubt it is 7.
7 ## It can't be 7.
7 ## It is not 7.
7 ## The answer is not $7$.
7 ## 7 is not the answer.
7 ## 7 isn't right.
7 ## 7 is wrong.
7 ## The answer 7 is wrong.
7 ## The answer is not \boxed{7}
7 ## I don't think the answer is \boxed{7}.
7 ## I doubt that it is $\boxed{7}$.
8 ## The answer is 7. I don't think the answer is 8.
7 ## Is the answer 7?
Monday ## I don't think the answer is Monday.
7 ## The answer is 7 less than 20
7 ## The answer is 7 less than 20.
20 ## The answer is 7 less than 20.
7 ## 7 less than 20
20 ## It is 7 less than 20.
7 ## The answer is 7 more than 13.
13 ## The answer is 7 more than 13.
7 ## The answer is 7 fewer apples than 20.
20 ## She has 7 fewer than 20.
7 ## The answer is $7$ less than $20$.
7 ## The answer is 7 times 3.
7 ## The answer is 7 minus 2.
7 ## The answer is 7 squared.
7 ## The answer is less than 7.
\sqrt{2} ## \boxed{1.414213}
\sqrt{2} ## \boxed{1.4142}
\sqrt{2} ## The answer is 1.414213.
\pi ## \boxed{3.141592}
\pi ## \boxed{3.14}
e ## \boxed{2.718281}
\sqrt{3} ## \boxed{1.73205080}
2\pi ## \boxed{6.2831854}
\ln 2 ## \boxed{0.693148}
\ln 2 ## \boxed{0.69314717}
-\sqrt{2} ## \boxed{-1.414213}
1.41421356237 ## \boxed{1.414213}
7 ## The answer is <b>77</b>.
7 ## The answer is 7<sup>2</sup>.
7 ## The answer is __7__ or __8__.
42 ## The answer is 42 (not).
42 ## The answer is 42 (incorrect).
42 ## The answer is 43 (42).
42 ## \boxed{42 (no)}
42 ## \boxed{42 (factorial)}
(2,5) ## The answer is [2, 5].
(2,5) ## The interval is (2, 6).
2,3,5 ## The primes are 2, 3.
5 ## The answer is {2, 3, 5}.
-2 ## The answer is: -2 * pi
2 ## The value is -π/2.
6 ## So theta = pi/6.
6 ## So theta is 5*pi/6 radians.
5 ## The answer is 5*pi/6.
2 ## The answer is e^2.
3 ## The root is 2 + 3i.
2 ## The root is 2 + 3i.
5 ## The root is 2 + 3i.
4 ## The area is 4π square units.
2 ## The distance is 5√2.
5 ## The distance is 5√2.
10 ## I really don't think that the answer is 10.
10 ## I do not believe 10 is the answer.
10 ## I don't believe it to be 10.
10 ## I doubt the final answer is 10.
10 ## It's doubtful that the answer is 10.
10 ## It is not the case that the answer is 10.
10 ## It is not correct that the answer is 10.
10 ## It is incorrect to say the answer is 10.
10 ## There is no way that the answer is 10.
10 ## The answer cannot be 10.
10 ## The answer can't be 10.
10 ## The answer could not be 10.
10 ## The answer is never 10.
10 ## The answer is anything but 10.
10 ## The answer is not equal to 10.
10 ## 10 is not correct.
10 ## 10 isn't the answer.
10 ## 10 can't be right.
10 ## 10 is incorrect.
10 ## 10 would be wrong.
10 ## 10 is too big.
10 ## The answer is 10? No.
10 ## I don't think so: the answer is 9.
10 ## I wouldn't say the answer is 10.
10 ## No one would say that the answer is 10.
10 ## It is impossible that the answer is 10.
10 ## I am unsure whether the answer is 10.
10 ## I'm uncertain that the answer is 10.
10 ## I refuse to say the answer is 10.
10 ## I deny that the answer is 10.
10 ## The incorrect answer is 10.
10 ## I don't think \boxed{10} is right.
10 ## \boxed{10} is wrong.
10 ## \boxed{10} is not the answer.
10 ## #### not 10
10 ## The answer is 10 less than 30.
30 ## The answer is 10 less than 30.
10 ## The answer is 10 greater than 3.
10 ## The answer is 10 years older than 30.
10 ## The answer is $10 more than $5.
10 ## It is 10 smaller than 30.
10 ## The answer is 10 times 5.
10 ## The answer is 10 below 50.
10 ## The answer is 10% of 100.
10 ## The answer is 10 percent of 100.
10 ## The answer is 10 plus 5.
10 ## The answer is 10 to the power of 2.
10 ## The answer is 10 cubed.
10 ## The answer is the cube of 10.
10 ## The answer is 20 divided by 2.
10 ## The answer is 20 / 2.
936 ## \boxed{347 + 589}
21 ## \boxed{84/4}
21 ## \boxed{84 / 4}
21 ## \boxed{\dfrac{84}{4}}
21 ## The answer is 84 ÷ 4.
21 ## The answer is 84/4 apples.
21 ## 84/4 = x
12 ## \boxed{144/12}
50 ## \boxed{100/2}
2.5 ## \boxed{100/40}
\sqrt{5} ## \boxed{2.236067}
\sqrt{5} ## \boxed{2.23606797}
\sqrt{10} ## \boxed{3.162277}
\frac{1+\sqrt{5}}{2} ## \boxed{1.618033}
\sin 1 ## \boxed{0.841470}
17 ## The answer is ~~17~~ 18.
1 ## She ate 1½ pies.
1234567 ## The answer is 1_234_56.
1/2 ## The answer is 1/2 or 0.6.
1/2 ## 0.5 (or 1/3)
0.5 ## 0.5 (or 2)
5 ## The primes are 2, 3, 5.
5 ## The primes are 2, 3 and 5.
5 ## The solutions are x = 3 and x = 5.
5 ## x = 3 or x = 5
5 ## x = 3, x = 5
7 ## The lengths are 3, 5 and 7 cm.
8 ## The train arrives at 8:30.
3 ## So the ratio of boys to girls is 3:4 here.
7 ## Wrong answer: 7
7 ## My wrong answer: 7
7 ## **An incorrect answer:** 7
7 ## The answer is no longer 7.
7 ## The answer is unlikely to be 7.
7 ## It is impossible for the answer to be 7.
7 ## The answer is the negative of 7.
7 ## The answer is 7 or more.
7 ## The answer is 7 apples or more.
7 ## The answer is 7 more than x.
7 ## The answer is 7, which is wrong.
7 ## Some say the answer is 7, but that is wrong.
7 ## If the answer is 7, then we get a contradiction.
7 ## The answer is 7. Wait, no, it is 8.
12 ## 12, but that's wrong.
12 ## This is not the answer: 12
12 ## You would think the answer is 12, but it isn't.
12 ## The answer is 12. Correction: 13
2 ## x_1 = 1, x_2 = 2
2 ## x = 1 or x = 2, as required.
"""


def pairs(table: str) -> list[tuple[str, str]]:
    return [
        (gold, response)
        for gold, _, response in (line.partition(" ## ") for line in table.strip().splitlines())
    ]


@pytest.mark.parametrize(("table", "score"), [(RIGHT, 1.0), (WRONG, 0.0)], ids=["right", "wrong"])
def test_what_the_text_states(table, score):
    assert len(pairs(table)) > 100
    assert [pair for pair in pairs(table) if compute_score("", pair[1], pair[0]) != score] == []


@pytest.mark.parametrize(
    "piece",
    [
        "I do not think 7 ",
        "the answer is not 7\n",
        "not the answer is 7 ",
        "the answer is 7. Wait, ",
        "7 is wrong ",
        "7 less than ",
        "7 (a) ",
        "<b>",
        "are 2, ",
        "x = 2 or ",
        "1½ ",
        "1_000 ",
        "not \\boxed{7} ",
        "[1, 2] ",
        "(100,100,",
        "1 + ",
        "sqrt(",
        "_7_ ",
        '"7',
        "[1, 2, ",
    ],
)
def test_a_long_text_takes_linear_time(piece):
    # hours, if a search backtracked
    assert compute_score("", piece * (60_000 // len(piece)), "18") == 0.0
