//! What tests and the code that they test say to each other: values, exceptions, objects, functions. The two live in two processes, and honest
//! code does not notice.

use std::time::Duration;

use rollflow::sandbox::{Limits, Sandbox};
use serde_json::json;

use super::{limits, passed, walls_within};

/// Every kind of walls, with time for a machine that does much else.
fn walls() -> Vec<Sandbox> {
    walls_within(Limits { wall: Duration::from_secs(120), ..limits() })
}

/// Each test must pass, for code that is right.
fn all_pass(code: &str, tests: &[&str]) {
    for sandbox in walls() {
        let results = sandbox.test(code, &json!(tests)).unwrap();
        assert!(results.iter().all(Result::is_ok), "{results:?}");
    }
}

#[test]
fn values_arrive_as_they_were_with_their_types() {
    let code = r#"
import collections, datetime, decimal, enum, fractions
def same(x): return x
def kinds():
    P = collections.namedtuple("P", "x y")
    return [None, True, 2**200, -2**63, 0.1, float("inf"), -0.0, 1e-320, 1+2j, "a\n\0\ud800\U0001f600\"\\", b"\xff\0", bytearray(b"x"), (1,), [], {1, 2},
            frozenset("a"), {(1, 2): [3], None: {}}, range(3, 9, 2), P(1, 2), collections.Counter("aab"), collections.deque([1], 4),
            collections.defaultdict(list, a=[1]), collections.OrderedDict(b=1), decimal.Decimal("1.10"), fractions.Fraction(1, 3),
            datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.date(2024, 2, 29), datetime.timedelta(1, 2, 3)]
def nan(): return float("nan")
class Number(enum.IntEnum): ONE = 1
def one(): return Number.ONE
"#;
    all_pass(
        code,
        &[
            "import collections, datetime, decimal, fractions\nk = kinds()\nassert k == [None, True, 2**200, -2**63, 0.1, float('inf'), -0.0, 1e-320, \
             1+2j, 'a\\n\\0\\ud800\\U0001f600\"\\\\', b'\\xff\\0', bytearray(b'x'), (1,), [], {1, 2}, frozenset('a'), {(1, 2): [3], None: {}}, \
             range(3, 9, 2), (1, 2), {'a': 2, 'b': 1}, collections.deque([1]), {'a': [1]}, collections.OrderedDict(b=1), decimal.Decimal('1.1'), \
             fractions.Fraction(1, 3), datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.date(2024, 2, 29), datetime.timedelta(1, 2, 3)], k",
            "k = kinds()\nassert same(k) == k and [type(x) for x in same(k)[:18]] == [type(x) for x in k[:18]]",
            "import math\nassert math.copysign(1, same(-0.0)) == -1 and nan() != nan() and math.isnan(same(nan()))",
            "k = kinds()\nassert k[18].y == 2 and k[19].most_common(1) == [('a', 2)] and k[20].maxlen == 4",
            "assert same((1, 2)) != [1, 2] and same(1) is not True and type(same(1.0)) is float and type(same(True)) is bool",
            "assert one() == 1 and one().name == 'ONE' and one() is not None and one() != 2",
            "x = [[1]]\nassert same(x) == x and same(x) is not x",
            "assert same(10**5000) == 10**5000 and same('x' * 10**5) == 'x' * 10**5 and same(list(range(50000)))[-1] == 49999",
        ],
    );
}

#[test]
fn exceptions_objects_functions_and_what_is_printed_cross_over() {
    let code = r#"
import asyncio, math
class Empty(LookupError):
    def __init__(self, what): super().__init__(what); self.what = what
    def __str__(self): return "nothing in " + self.what
class Stack:
    made = 0
    def __init__(self, *items): self.items = list(items); Stack.made += 1
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty("stack")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, at): return self.items[at]
    def __setitem__(self, at, item): self.items[at] = item
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __add__(self, other): return Stack(*self.items, *other.items)
    def __str__(self): return "Stack" + str(self.items)
    def __enter__(self): return self
    def __exit__(self, *_): self.items.clear()
class Words(list):
    def longest(self): return max(self, key=len)
def sort(items): items.sort()
def fill(table): table["b"] = [1]; table.pop("a")
def twice(function): return lambda x: function(function(x))
def apply(function, *arguments, **named): return function(*arguments, **named)
def count(n):
    for at in range(n): yield at
def hello(name): print("hello", name)
async def later(x): await asyncio.sleep(0); return x + 1
def refuse(x): raise ValueError("no %s" % x, x)
def key(x): return {}[x]
class Solution:
    def twoSum(self, nums, target):
        return next((i, j) for i in range(len(nums)) for j in range(i) if nums[i] + nums[j] == target)
def sum(a, b): return a * b
total = 0
def bump():
    global total
    total += 1
"#;
    all_pass(
        code,
        &[
            "s = Stack(1, 2)\nassert len(s) == 2 and s[0] == 1 and list(s) == [1, 2] and 2 in s and 3 not in s and str(s) == 'Stack[1, 2]'",
            "s = Stack()\nassert not s\ns.push(1).push(2)\nassert s and s.pop() == 2 and s.items == [1]\ns[0] = 9\nassert s[0] == 9\ns.items = []\nassert not s",
            "try:\n    Stack().pop()\n    assert False\nexcept Empty as error:\n    assert str(error) == 'nothing in stack' and isinstance(error, LookupError)",
            "assert Stack(1) == Stack(1) and Stack(1) != Stack(2) and (Stack(1) + Stack(2)).items == [1, 2] and isinstance(Stack(), Stack)",
            "with Stack(1) as s:\n    assert len(s) == 1\nassert len(s) == 0",
            "w = Words(['a', 'bcd'])\nassert w == ['a', 'bcd'] and w != ['a'] and w.longest() == 'bcd' and not isinstance(Stack(), Words)",
            "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]\nt = {'a': 0}\nfill(t)\nassert t == {'b': [1]}",
            "assert twice(lambda x: x * 3)(2) == 18 and apply(lambda a, b=1: (a, b), 5, b=[7]) == (5, [7]) and apply(max, [1, 9]) == 9",
            "def throws():\n    raise KeyError('mine')\ntry:\n    apply(throws)\n    assert False\nexcept KeyError:\n    pass",
            "assert list(count(3)) == [0, 1, 2] and [x for x in count(2)] == [0, 1]\ng = count(1)\nassert next(g) == 0 and next(g, None) is None",
            "import asyncio\nassert asyncio.run(later(1)) == 2",
            "import contextlib, io\nsaid = io.StringIO()\nwith contextlib.redirect_stdout(said):\n    hello('you')\nassert said.getvalue() == 'hello you\\n'",
            "try:\n    refuse(3)\nexcept ValueError as error:\n    assert error.args == ('no 3', 3) and str(error) == \"('no 3', 3)\"\ntry:\n    key('k')\nexcept KeyError as error:\n    assert error.args == ('k',)",
            "assert Solution().twoSum([2, 7], 9) == (1, 0) and math.pi > 3",
            "assert sum(3, 4) == 12",
            "bump()\nassert total == 1\nbump()\nassert total == 2",
            "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(key.__name__, 'key')\n        with self.assertRaises(ValueError):\n            refuse(1)\n\
             result = unittest.TestResult()\nunittest.defaultTestLoader.loadTestsFromTestCase(T).run(result)\nassert result.wasSuccessful() and result.testsRun == 1",
        ],
    );
}

#[test]
fn calls_are_compared_with_the_results_that_json_can_say() {
    let tests = json!({
        "fn_name": "pair",
        "inputs": [[1, [2, 3]], [0.5, []], ["x", null], [1, 1]],
        "outputs": [[1, [2, 3]], [0.5, []], [["x", null]], [1, 2]],
    });
    for sandbox in walls() {
        for code in ["def pair(a, b): return (a, b)", "class Solution:\n    def pair(self, a, b): return [a, b]"] {
            let results = sandbox.test(code, &tests).unwrap();
            assert_eq!((passed(&results), results.len()), (3, 4), "{results:?}");
            assert!(results.into_iter().find_map(Result::err).unwrap().contains("it gave [1, 1] instead of [1, 2]"));
        }
        for code in ["class A:\n    __eq__ = lambda *_: True\npair = lambda *_: A()", "def pair(*_): raise StopIteration", ""] {
            assert_eq!(passed(&sandbox.test(code, &tests).unwrap()), 0, "{code}");
        }
    }
}
