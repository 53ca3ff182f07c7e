"""Answers of known truth against verifiers of numbers and mathematics: the rule is that what is not
understood is wrong, and that a list of alternatives is no answer."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openrl.extension_points import verifiers
from openrl.rewards.verifiers.base import Answer, read_options
from openrl.rewards.verifiers.time_limit import TooSlow, processor_time


def reward(name, response, label):
    return verifiers[name].component(Answer("", response, label), read_options(name, {})).reward


# Contents of a box, and a label that says the same.
# fmt: off
SAME = [
    ("5", "5"), ("5.0", "5"), (r"\frac{1}{2}", "0.5"), (r"\dfrac{3}{4}", "3/4"),
    ("1,234", "1234"), ("x^2+2x+1", "(x+1)^2"), (r"\{1,2\}", r"\{2,1\}"), ("x=5", "5"),
    (r"\sqrt{8}", r"2\sqrt{2}"), (r"2\pi", r"2\pi"), ("5!", "120"), ("x>5", "x>5"), ("5 cm", "5"),
    ("5", "5 cm"), (r"5\text{ cm}", "5 cm"), ("1011_2", "1011_2"), ("1011_{2}", "1011_2"),
    ("1011", "1011_2"), ("1.6e-19", "1.6e-19"), (r"1.6\times 10^{-19}", "1.6e-19"), ("A", "A"),
    ("5,6", "6,5"), (r"x=1 \text{ or } x=2", r"x=1 \text{ or } x=2"), ("Evelyn", "Evelyn"),
    (r"\text{Evelyn}", "Evelyn"), ("evelyn", "Evelyn"), (r"\text{east}", "east"), ("Yes", "yes"),
    (r"\text{(B)}", "B"), ("(B)", r"\text{(B)}"), ("B", r"\text{(B)}"), (r"\textbf{(C)}", "C"),
    (r"50\%", "50"), (r"50\%", "0.5"), ("50%", r"50\%"), (r"90^\circ", "90"),
    (r"90^{\circ}", r"90^\circ"), ("90", r"90^\circ"), (r"\$5", "5"), (r"\$1,000", "1000"),
    ("5 dollars", "5"), (r"(-\infty, 5)", r"(-\infty,5)"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt3}{2}"), (r"\frac12", "1/2"), ("2^{10}", "1024"),
    ("1024", "2^{10}"), (r"\log_2 8", "3"), (r"\sin(\pi/6)", "1/2"), ("x+y", "y+x"), ("2x", "x2"),
    ("y=2x+3", "y=2x+3"), ("2x+3", "y=2x+3"), ("y=2x+3", "2x+3"), (r"1\frac{1}{2}", "3/2"),
    ("1 1/2", "3/2"), (r"-\frac{1}{2}", r"\frac{-1}{2}"), ("10^3", "1000"), ("1e3", "1000"),
    (r"1.5 \times 10^3", "1500"), (r"\emptyset", r"\varnothing"), (r"\{\}", r"\emptyset"),
    (r"\mathbb{R}", r"\mathbb{R}"), (r"(-\infty,\infty)", r"\mathbb{R}"),
    (r"x\in[3,\infty)", r"[3,\infty)"), ("2+3i", "3i+2"), ("2:3", "2/3"), ("12:30", "12:30"),
    ("5 apples", "5"), (r"\pm 5", r"\pm 5"), ("5, -5", r"\pm 5"), (r"\infty", r"\infty"),
    (r"\text{DNE}", r"\text{DNE}"), (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"), ("5 m/s", "5 m/s"), (r"5\text{ cm}^2", "5"),
    ("3 hours", "3"), (r"3\text{ hours}", "3 hours"), (r"\approx 5", "5"), ("AB", "AB"),
    (r"\triangle ABC", r"\triangle ABC"), ("xy", "yx"), ("(x-1)(x+2)", "x^2+x-2"),
    ("x^2+x-2", "(x-1)(x+2)"), ("2^{100}", "1267650600228229401496703205376"), ("101", "101_2"),
    (r"6.02\times10^{23}", r"6.02\times10^{23}"), ("0.1", "1/10"), (".5", "0.5"), ("5.", "5"),
    ("+5", "5"), ("--5", "5"), (r"\left(1,2\right)", "(1,2)"),
    (r"\left\{1,2\right\}", r"\{1,2\}"), (r"x \in \{1,2\}", r"\{1,2\}"),
    ("n(n+1)/2", r"\frac{n(n+1)}{2}"), ("2n", "n2"), ("Monday", "Monday"),
    ("January 5", "January 5"), ("3:00 PM", "3:00 PM"), ("12.5", r"\$12.50"),
    ("2a_{16}", "2A_{16}"), (r"12\ldots", r"12\dots"), ("[5]", "5"), ("|-5|", "5"), ("|5|", "5"),
    (r"\frac{1}{2^{2005}}", "2^{-2005}"), (r"\sqrt{2}\sqrt{3}-\sqrt{6}", "0"),
    (r"\frac{\ln 2}{\ln 3}", r"\log_3 2"), (r"\lfloor 3.7\rfloor", "3"),
    ("100!/99!", "100"), (r"\sqrt[3]{2}", "2^{1/3}"), (r"33\frac{1}{3}\%", r"33\frac{1}{3}"),
    (r"\angle ABC=40^\circ", "40"), (r"\frac{n(n-1)}{2}", r"\binom{n}{2}"), ("x^2-4", "(x-2)(x+2)"),
    ("f(2, 3) = 5", "5"), (r"\gcd(12, 8)", "4"), (r"\gcd(12,8)=4", "4"), ("C(5,2) = 10", "10"),
    (r"\sum_{i=1}^{4} i = 10", "10"), (r"\int_0^1 2x\,dx = 1", "1"), (r"\lim_{x\to 0} f = 2", "2"),
    ("10_{10}", "10"), ("10, 101", "(10, 101_2)"), ("(10, 101)", "10, 101_2"),
]
DIFFERENT = [
    ("(1,2)", "(2,1)"), ("6", "5"), ("-3", "3"), (r"\sqrt{5}", "5"), (r"2\pi", "2"), ("5!", "5"),
    ("x>5", "5"), (r"\text{not }5", "5"), (r"x \neq 5", "5"), ("5 cm", "5 m"),
    (r"5\text{ cm}", r"5\text{ m}"), (r"5\ \mathrm{km}", "5 m"),
    (r"5\,\text{kg}", r"5\,\text{g}"), ("1011_2", "1011_3"), ("11_{10}", "1011_2"),
    ("1.6e-19", "9.1e-31"), ("0", "1e-10"), ("0.0000001", "0.0000002"), ("A or B", "A"),
    ("5 or 6", "5"), (r"5 \text{ or } 6", "5"), ("either 5 or 6", "6"), ("5, 6", "5"),
    ("nylevE", "Evelyn"), ("west", "east"), ("tase", "east"), ("no", "yes"), ("C", r"\text{(B)}"),
    ("[1,2)", "[1,2]"), ("(1,2)", "[1,2]"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("0.333333", "1/3"), ("0.33", "1/3"), ("3.14", r"\pi"), ("3.14159265", r"\pi"), ("a+b", "ab"),
    ("3x+1", "3x-1"), ("x>3", r"[3,\infty)"), ("x<5", "x>5"), ("2-3i", "2+3i"), ("i", "-i"),
    ("2:3", "3:2"), ("five", "5"), ("", "5"), ("?", "5"), ("unknown", "5"), (r"\pm 5", "5"),
    (r"\pm5", "-5"), (r"-\infty", r"\infty"), (r"\text{undefined}", "0"),
    ("0", r"\text{undefined}"), ("3.0 m", "300 cm"), ("5 km/h", "5 m/s"),
    (r"25\text{ cm}^2", r"25 \text{ cm}^3"), ("12 hours", "12 minutes"),
    (r"x = 5 \text{ or } 6", "5"), (r"5 \text{ and } 6", "5"), ("5; 6", "5"), ("5 6", "5"),
    (r"5\\6", "5"), ("about 5", "5"), ("AB", "BA"), ("ABC", "CAB"), ("F_{16}", "15"),
    (r"\frac{5}{0}", "5"), (r"5\cdot 10^{-7}", r"6\cdot 10^{-7}"),
    (r"6.02\times10^{23}", r"6.03\times10^{23}"), ("10000001", "10000000"),
    (r"\{1,2,3\}", r"\{1,2\}"), ("1,2,3", "1,2"), ("k", "n"), ("p", "q"), (r"\theta", r"\alpha"),
    ("Monday", "Tuesday"), ("5 January", "January 5"), ("June 20", "20"), ("12 pm", "12 am"),
    ("3:00 AM", "3:00 PM"), (r"12\ldots", "12"), ("12...", "12"), ("12\u2026", "12"),
    (r"12, 13, \dots", "12, 13"), ("12th", "12"), ("12^{th}", "12"), ("12k", "12"), ("12M", "12"),
    (r"12\text{ hundred}", "12"), ("> 12", "12"), (r"\geq 12", "12"), (r"\le 12", "12"),
    (r"\gtrsim 12", "12"), (r"\sim 12", "12"), (r"\neg 12", "12"), ("12/x", "12"),
    (r"\sum 12", "12"), (r"\lim_{x\to 12}", "12"), ("12^T", "12"), ("[12,12]", "12"),
    (r"\{12,12\}", "12"), ("x = [12,12]", "12"), ("x = 1 234", "235"), ("x >= 12", "12"),
    (r"x = \{12,12\}", "12"), ("1 234", "235"), ("5 6", "11"), ("|-5|", "-5"), ("12 MB", "12 GB"),
    ("12 bits", "12 bytes"), (r"\ln 2", r"\log_{10} 2"), ("at least 12", "12"), ("12 mod 5", "12"),
    (r"\lfloor 5.5\rfloor", "5.5"), (r"\overline{12}", "12"), ("f(12)", "12"), ("12 + C", "12"),
    ("10_2", "10"), ("(10, 101_2)", "10, 101"), ("10, 101_2", "(10, 101)"),
    # numbers near 0 or near each other, whose decimals or floats are equal
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"), ("2^{-2000}", "2^{-1999}"), ("2^{-2000}", "0"),
    (r"1-\frac{1}{2^{99}}", r"1-\frac{1}{2^{100}}"), ("e^{-1000}", "e^{-1001}"),
    (r"\frac{2004!}{2^{2004}}", r"\frac{2004!}{2^{2003}}"), (r"\frac{i}{2^{99}}", r"\frac{i}{2^{98}}"),
]
NUMBERS = [
    ("The answer is **18**.", 18), ("#### **18**", 18), ("**Answer: 18**", 18), ("*18*", 18),
    ("`18`", 18), ("__18__", 18), (r"\boxed{5\text{ cm}}", "5 cm"),
    ("It is 5 centimeters.", "5 cm"), ("5", "5 cm"), ("5 cm", "5"), ("between 5 and 10", 10),
    ("2x = 10, so x = 5.", 5), ("x=5", 5), (r"\boxed{x=5}", 5), ("x = -5", -5), ("7 - 3 = 4", 4),
    ("3 + 4 = **7**", 7), ("- 5", 5), ("Items:\n- 5", 5), ("-5", -5), ("The answer is -5.", -5),
    ("The answer is $-5$.", -5), (r"The answer is \(-5\).", -5), (r"\[ x = 12 \]", 12),
    ("It costs $1,234.50 in all.", 1234.5), ("The total is $18", 18), ("18 dollars", 18),
    ("18%", "18"), (r"\boxed{1{,}000}", 1000), (r"\boxed{1\,000}", 1000), (r"\boxed{\$18}", 18),
    (r"\boxed{\$18.00}", 18), (r"\boxed{18 \text{ eggs}}", 18), ("<answer>18</answer>", 18),
    ("<answer>The answer is 18</answer>", 18), ("<answer>18 eggs per day</answer>", 18),
    (r"\boxed{\frac{3}{4}}", 0.75), ("3/4", 0.75), ("1 1/2", 1.5), (r"\boxed{1\frac{1}{2}}", 1.5),
    ("1.5e3", 1500), (r"1.5 \times 10^3", 1500), ("The area is 25 cm^2.", 25),
    (r"The area is $25\text{ cm}^2$.", 25), ("The area is 25 square cm.", 25), ("45\u00b0", 45),
    (r"$45^\circ$", 45), (r"\boxed{45^{\circ}}", 45), ("\u2248 18", 18),
    ("Step 1. We get 18.", 18), ("1. a\n2. b\nAnswer: 18", 18), ("=> 18", 18), ("> 18", 18),
    ("--> 18", 18), ("18 -> 20", 20), ("(18)", 18), ("[18]", 18), ("{18}", 18), ("\"18\"", 18),
    ("'18'", 18), ("18 <end>", 18), ("**$18$**", 18), (r"$\boxed{18}$", 18),
    (r"$\boxed{18}$ dollars", 18), ("18.0", 18), ("18.", 18), (r"\boxed{18.}", 18),
    (r"\boxed{ 18 }", 18), (r"\boxed{+18}", 18), (r"\boxed{(18)}", 18), ("| -18 |", -18),
    (r"\boxed{\text{18}}", 18), (r"\boxed{18~\text{km/h}}", "18 km/h"), ("half of 18", 18),
    ("twice 18", 18), ("It takes 18-year loans.", 18), (r"\boxed{0.\overline{6}}", "2/3"),
    ("It is about 5 million people.", 5_000_000), (r"\boxed{24\text{ ft}^2}", "24 square feet"),
    ("60 miles per hour", "60 mph"), (r"\boxed{12 \text{ boys}}", "12 boys"),
]
NOT_THE_NUMBER = [
    ("First 17, then **18**.", 17), (r"\boxed{\sqrt{5}}", 5), (r"It is \sqrt{5}", 5),
    (r"It is $\sqrt{5}$.", 5), (r"$2\pi$", 2), (r"\boxed{2\pi}", 2), ("5!", 5),
    (r"\boxed{5!}", 5), ("x>5", 5), ("So x > 5.", 5), (r"\boxed{\text{not }5}", 5),
    ("It is not 5.", 5), ("5 cm", "5 m"), (r"\boxed{5\text{ cm}}", "5 m"), ("5 or 6", 6),
    ("5 or 6", 5), ("either 5 or 6", 6), (r"\boxed{5\text{ or }6}", 5), ("5 million", 5),
    ("5-10", 10), ("between 5 to 10", 10), ("x - 5", 5), ("x -5", -5), ("7 - 3", 3),
    ("<answer>18 and 19</answer>", 18), ("10^3", 10), ("2^5", 5), ("2^{5}", 5), ("5^2", 5),
    ("log_2 8", 8), (r"\log 8", 8), ("5i", 5), ("3 + 5i", 3), ("5x", 5), ("a_5", 5), ("x_5", 5),
    ("18 = x", 18), ("Answer: 18\nStep 2x", 18), (r"\boxed{18^{th}}", 18), ("5:30", 30),
    ("12:30", 12), ("2/0", 2), ("1011_2", 1011), (r"\boxed{18~\text{m/s}}", "18 km/h"),
    ("18th", 18), ("18...", 18), (r"\boxed{18\ldots}", 18), ("|-5|", -5), (">=18", 18),
    ("It is at least 18.", 18), ("more than 18", 18), ("It isn't 18.", 18), (r"\boxed{18k}", 18),
    (r"\boxed{18/x}", 18), ("18M", 18), (r"\boxed{18...}", 18),
    (r"\boxed{12 \text{ girls}}", "12 boys"), ("It costs \u00a312.", "$12"), ("60 miles", "60 mph"),
    (r"\boxed{0.\overline{6}}", "0.6"), (r"\boxed{7 \text{ or more}}", 7),
    ("18-x", 18), ("18-xy", 18), ("x = 10 or x = 18", 18), (r"\boxed{x = 17, y = 18}", 18),
]
MARKED = [
    ("#### 18", 18), ("#### **18**", 18), ("####18", 18), ("#### $18", 18), ("#### 18 eggs", 18),
    ("#### 18.00", 18), ("#### 5 apples of 9", 5), ("#### -18", -18), ("#### 1,800", 1800),
    ("#### |-5|", 5), ("#### $|-5|$\nDone.", 5), (r"#### \lvert -5 \rvert", 5),
]
NOT_THE_MARKED = [
    ("#### 18 or 19", 18), ("#### |-5|", -5), ("#### |-5|x", 5), ("#### 5!", 5), ("#### x>5", 5), (r"#### \sqrt{5}", 5),
    (r"#### 2\pi", 2), ("#### 5 million", 5), ("#### x2, so 5", 5),
    (r"#### \text{not }5", 5), ("#### 5 cm", "5 m"), ("#### 12, 13", 12), ("#### 12 and 13", 12),
    ("#### 2 hours and 15 minutes", 2), ("#### 12:05", 12), ("#### 12--13", 12), ("#### 12-x", 12),
]
# Where taking an answer for an expression alone goes wrong: (answer, label).
SAME_PARTS = [
    (r"24 \text{ ft}^2", "24 square feet"), ("60 miles per hour", "60 mph"), ("60 mi/h", "60 mph"),
    (r"12\,\text{m}\,\text{s}^{-1}", "12 m/s"), ("8.314", r"8.314 \text{ J/(mol K)}"),
    ("50\u00a2", "50 cents"), ("500 rupees", "Rs. 500"), ("5 cm long", "5 cm"), ("12 men", "12"),
    ("100", r"100^\circ\text{C}"), (r"100^\circ", r"100^\circ\text{C}"), ("36", "3 dozen"),
    (r"2.5\times10^6", "2.5 million"), (r"0.\overline{3}", "1/3"), ("3/11", r"0.\overline{27}"),
    ("P=2w+2l", "P = 2l + 2w"), ("x<3", r"(-\infty, 3)"), (r"x \ge 3", r"[3,\infty)"),
    (r"-2\le x\le 2", "[-2,2]"), ("3<x<5", "(3,5)"), ("3>x>-1", "-1 < x < 3"),
    (r"x<-1 \text{ or } x>1", r"(-\infty,-1)\cup(1,\infty)"), (r"1 \text{ or } 2", r"\{1,2\}"),
    (r"x=3 \text{ or } x=-3", r"\pm 3"), ("x=1, x=-2", r"x = 1 \text{ or } -2"),
    ("x=2, y=3", "(2, 3)"), ("y = 3, x = 2", "x = 2, y = 3"), (r"\log_e 3", r"\ln 3"),
    (r"\sin 60^\circ", r"\frac{\sqrt{3}}{2}"), (r"\tan 45^\circ", "1"), ("3:45 p.m.", "3:45 PM"),
    (r"101_{\text{2}}", "101_2"), (r"\text{infinity}", r"\infty"), ("YES", "yes"),
    ("sqrt(x+1)", r"\sqrt{x+1}"), ("x**2 + 1", "x^2+1"), ("2*sqrt(2)", r"\sqrt{8}"),
    ("2\u221a2", r"\sqrt{8}"), ("0.5pi", r"\frac{\pi}{2}"), ("\u00bd", "1/2"),
    ("10\u207b\u00b3", "0.001"),
    ("E = c^2 m", "E = mc^2"), ("d=tr", "d = rt"),
    (r"\begin{bmatrix}a&b\\c&d\end{bmatrix}", r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}"),
    ("hr^2", "r^2 h"), ("ff_{16}", "FF_{16}"), ("3e8 m/s", "3*10^8"),
    ("increasing on (0,2)", "Increasing on (0, 2)"), (r"{n \choose 2}", r"\binom{n}{2}"),
    (r"e^{i\pi}", "-1"), ("1, 2", "(1,2)"), ("2(3)", "6"), ("(2)(3)", "6"), (r"\log_2(8)", "3"),
    (r"\frac{\binom{4}{2}\binom{6}{1}}{\binom{10}{3}}", "0.3"), (r"2\binom52", "20"),
    (r"4\frac23\pi", r"\frac{14\pi}{3}"), (r"\frac\pi6+2k\pi", r"2\pi k+\frac{\pi}{6}"),
    (r"\frac n{n+1}", r"\frac{n}{n+1}"), (r"\sin\pi", "0"),
    (r"n\equiv 3 \bmod 7", r"n \equiv 3 \pmod{7}"),
    (r"x\not=2", r"x \neq 2"), (r"9.8\,\mathrm{m\,s^{-2}}", r"9.8 \text{ m/s}^2"),
    (r"2\mathbf j-\mathbf i", r"-\mathbf{i}+2\mathbf{j}"), ("-5", r"\det A = -5"),
    (r"\det(A)=-5", r"\det A = -5"), (r"72^\circ", r"\angle ACB = 72^\circ"),
    (r"\frac16", r"P(A\cap B)=\frac16"), (r"\frac{2x}{3y}", r"\frac{dy}{dx} = \frac{2x}{3y}"),
    (r"x_1=2,\ x_2=-5", "x=-5, x=2"), ("x=2, -5", "x_1 = 2, x_2 = -5"), (r"a_n=3n", "a_{n} = 3n"),
    (r"|x|\le3", "[-3,3]"), (r"\{x\mid -1<x<2\}", r"\{x | -1 < x < 2\}"),
    (r"(-1,2)", r"\{x | -1 < x < 2\}"), (r"2\sqrt5", r"|AB| = 2\sqrt{5}"), ("15", "C_6^2 = 15"),
    (r"6\sqrt3", r"S_{\triangle ABC} = 6\sqrt{3}"), ("3", r"\lim_{n\to\infty} a_n = 3"),
    (r"4\pi(3)^2", r"36\pi"), (r"\begin{cases}x=1\\y=2\end{cases}", "x=1, y=2"),
    (r"\frac{\binom42}{\binom72}", "2/7"),
    ("empty set", r"\text{the empty set}"), (r"\lg 2", r"\log_{10} 2"), ("9{:}45", "9:45"),
]
DIFFERENT_PARTS = [
    ("12.5 cm", r"12.5\%"), ("15%", "15 students"), ("5 cups", "5 cm"), ("12 girls", "12 boys"),
    ("24 feet", "24 square feet"), ("24 cubic feet", "24 square feet"), ("60 kph", "60 mph"),
    ("7 boxes of apples", "7 apples"), ("15 pencils per student", "15 students"),
    ("3", "3 dozen"), (r"100^\circ\text{F}", r"100^\circ\text{C}"),
    (r"45 \text{ radians}", r"45^\circ"),
    ("5 N m", "5 N"), ("50n", "50 N"), ("3 years", "3 light years"),
    ("20 nautical miles", "20 knots"),
    ("\u00a312", r"\$12"), ("12 cents", r"\$12"), ("$45", "\u00a345"), (r"\$50", "50 cents"),
    ("3.50 euros", r"\$3.50"), ("y = 5", "x = 5"), ("X = 5", "x = 5"), ("x_1 = 5", "x = 5"),
    (r"\alpha = 4", "a = 4"), (r"v = 36\pi", r"V = 36\pi"), ("f(10)=3", "f(3) = 10"), ("R", "r"),
    ("AB", "ab"), ("aB", "ab"), ("2a", "2A"), ("2A_1", "2A"), ("A^2+B^2", "a^2+b^2"),
    ("X_1", "x_1"),
    (r"\frac12 Mv^2", "mv^2/2"), (r"\pi r^2", r"\pi R^2"), (r"\sin X", r"\sin x"),
    ("|X|", "|x|"),
    (r"\{a,B\}", r"\{a, b\}"), ("2X+3Y=6", "2x + 3y = 6"), (r"\{3,4\}", "(3, 4)"),
    (r"\{\emptyset\}", r"\emptyset"), ("12/30", "12:30"), ("1776 BC", "1776"), ("3", r"\log_e 3"),
    (r"2 \text{ remainder } 3", r"3 \text{ remainder } 2"), ("2001", "2023-05-17"),
    ("gm m/r^2", "GM m/r^2"), ("f(x) = 2x", "f'(x) = 2x"), ("y > 4", "x > 4"), ("25", "x^2+y^2=25"),
    ("0.3333333", "1/3"), ("(0.3333333, 1)", "(1/3, 1)"), (r"7 \pmod{12}", "7"),
    ("x=2, z=3", "x = 2, y = 3"), ("E", "e"), ("d = Rt", "d = rt"), ("c^2", "c^2 m"),
    ("5 halves", "5"),
    ("5 maybe six", "5"), ("5 squared", "5"), (r"p \lor q", r"p \land q"), ("FF_{15}", "FF_{16}"),
    (r"|x|<3", "[-3,3]"), (r"\{x \in \mathbb{Z} | -1<x<2\}", "(-1,2)"),
    (r"|AC| = 2\sqrt5", r"|AB| = 2\sqrt{5}"), ("2(3)", "5"), ("(2)(3)", "5"),
    (r"\binom42\binom61", "12"), ("2:3:1", "2/3"),
    (r"\angle ABC = 72^\circ", r"\angle ACB = 72^\circ"), (r"\cos x = 1", r"\sin x = 1"),
    (r"\frac{dx}{dy} = \frac{2x}{3y}", r"\frac{dy}{dx} = \frac{2x}{3y}"),
    ("x_1=2, x_2=5", "x_1 = 5, x_2 = 2"), ("1e-31", "0"), ("y_1 = 1, y_2 = 6", "x = 1, x = 6"),
]
# fmt: on


@pytest.mark.parametrize(("box", "label"), SAME + SAME_PARTS)
def test_answers_that_are_the_label(box, label):
    assert reward("math_verify", f"So \\boxed{{{box}}}.", label) == 1


@pytest.mark.parametrize(("box", "label"), DIFFERENT + DIFFERENT_PARTS)
def test_answers_that_are_not(box, label):
    assert reward("math_verify", f"So \\boxed{{{box}}}.", label) == 0


PAIRS = Path(__file__).parent / "answer_pairs.jsonl"


@pytest.mark.full
@pytest.mark.parametrize("line", PAIRS.read_text("utf-8").splitlines())
def test_answers_to_one_label(line):
    """Answers of all kinds, which were written down with their truth before any was judged."""
    row = json.loads(line)
    for truth, answers in ((1, row["same"]), (0, row["different"])):
        wrong = [
            a for a in answers if reward("math_verify", f"\\boxed{{{a}}}", row["label"]) != truth
        ]
        assert not wrong, f"not {truth} for {row['label']}"


@pytest.mark.parametrize(("response", "label"), NUMBERS)
def test_numbers_that_are_the_label(response, label):
    assert reward("number", response, label) == 1


@pytest.mark.parametrize(("response", "label"), NOT_THE_NUMBER)
def test_digits_that_are_part_of_something_else(response, label):
    assert reward("number", response, label) == 0


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [(*row, 1) for row in MARKED] + [(*row, 0) for row in NOT_THE_MARKED],
)
def test_numbers_behind_the_mark(response, label, right):
    assert reward("gsm8k", response, label) == right


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("The answer is **34**.", "34", 1),
        ("<answer>The answer is 25</answer>", "25", 1),
        ("<answer>The final answer is $x+1$</answer>", "x+1", 1),
        (r"\boxed{\text{Area} = 25}", "25", 1),
        (r"\boxed{Area = 24}", "25", 0),
        ("<answer>The answer is 25 or 26</answer>", "25", 0),
        ("It is 5 cm.", "5 m", 0),
        ("Wait... so the answer is $12$.", "12", 1),
        (r"\boxed{1+2+\dots+9 = 45}", "45", 1),
        (r"\boxed{12, \dots, 20}", "12, 20", 0),
        ("The answer is Evelyn.", "Evelyn", 1),
        ("The answer is nylevE.", "Evelyn", 0),
        ("The answer is not Evelyn.", "Evelyn", 0),
        ("The answer is A or B.", "A", 0),
        ("The answer is $5$ or $6$.", "5", 0),
        ("The answer is $\\frac{1}{2}$.", "1/2", 1),
        ("Therefore\n\\[\n\\frac{3}{4}\n\\]", "0.75", 1),
        ("The answer is $12$ cents.", r"\$12", 0),
        ("Answer: 42 apples", "42 oranges", 0),
        ("Thus, they need 12 buses in total.", "12", 1),
        ("After selling 5 of his 12 marbles, Tom has 7 marbles.", "7", 1),
        ("6 + 9 = 15, and 15 * 2 = 30", "30", 1),
        ("The roots are $x = 2$ and $x = 3$.", "3", 0),
        ("The roots are $x = 2$ and $x = 3$.", "2, 3", 1),
        (r"So $\sin\theta = \frac{3}{5}$.", r"\cos\theta = \frac{3}{5}", 0),
        ("So 2 + 3 = x = 5", "x = 5", 1),
        ("Therefore $2x = 5$.", "x = 5", 0),
        ("Therefore 2 x = 5", "x = 5", 0),
        ("So y + x = 5", "x = 5", 0),
        ("So the max = 5", "x = 5", 0),
    ],
)
def test_what_the_end_of_a_response_says(response, label, right):
    assert reward("math_verify", response, label) == right


SLOW = [
    r"(x+y+z+w)^{50}",
    r"\binom{1000000000}{500000000}",
    r"(1+i)^{2024}",
    r"(x+1)^{1000}(x-1)^{1000}",
    r"\sum_{n=1}^{10^9} n^n",
    r"\int \sin(x^x) e^{x^2}dx",
    r"10^{10^{10}}",
    "e^{" * 300 + "x" + "}" * 300,
    r"\sin(" * 30 + "1" + ")" * 30,
    "(" * 400 + "1" + ")" * 400,
]


@pytest.mark.full
def test_answers_that_would_take_for_ever_are_wrong():
    """Each takes a second of processor time at most; a single one that is worked out would take
    longer than the minutes that all are given."""
    program = """
from tests.unit.rewards.test_same_answers import SLOW, reward
for answer in SLOW:
    assert reward("math_verify", "\\\\boxed{" + answer + "}", "5") == 0, answer
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=300)


LARGE = [
    r"\binom{1000000000}{500000000}",
    r"\binom{1000000}{500000}",
    "e^{" * 300 + "x" + "}" * 300,
    "e^{" * 100 + "x" + "}" * 100,
    "(" * 100 + "1" + ")" * 100,
    "2^" * 400 + "2",
    r"(x+y+z+w)^{50}",
    r"(x+1)^{1000}",
    r"(1+i)^{2024}",
]


@pytest.mark.parametrize("label", ["5", "x^2+1", r"2^{1011}"])
def test_what_is_too_large_is_seen_before_it_is_worked_out(label):
    """Worked out, each takes the second that it is given, or more."""
    reward("math_verify", r"\boxed{x+2}", label)  # what the first answer loads
    before = time.process_time()
    assert not any(reward("math_verify", f"\\boxed{{{answer}}}", label) for answer in LARGE)
    assert time.process_time() - before < 1.5


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        (r"(1+i)^{2024}", "2^{1012}"),
        (r"\frac{1}{1+" * 14 + "x" + "}" * 14, r"\frac{1}{1+" * 14 + "x" + "}" * 14),
        ("2i", "(1+i)^2"),
        (r"(1+x)^{1000}", "(x+1)^{1000}"),
        (r"(w+x+y+z)^{50}", "(x+y+z+w)^{50}"),
        (r"\binom{1000000}{2}", "499999500000"),
        (r"(x+1)^{20}-x^{20}", "(1+x)^{20}-x^{20}"),
        ("(x+1)^2(x-1)^2", "x^4-2x^2+1"),
    ],
)
def test_what_only_looks_large_is_right(answer, label):
    assert reward("math_verify", f"\\boxed{{{answer}}}", label) == 1


def test_processor_time_ends_a_loop_that_catches_exceptions():
    with pytest.raises(TooSlow), processor_time(0.05):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))
    with processor_time(60):
        pass  # and the timer of before is off
