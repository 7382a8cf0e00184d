"""Checks the live page in a browser: test_page.py ROLLFLOW [CHECK…]. Every pane at two widths and in two themes, the keyboard, names of
elements, hostile texts, the token's form, orders to a run, a run that is started from a form, and the frames of a run of 10,000 steps and 100,000 samples."""
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from chromium import Chromium, until
from large_run import enlarge

rollflow = str(pathlib.Path(sys.argv[1]).resolve())
TINY = ["model.hidden=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.intermediate=32", "sft.steps=2", "sft.batch=4", "batch.groups=4",
        "generate.group_size=4", "generate.max_num_seqs=8", "reward={kind='regex',pattern='[0-9]'}", "filter=[]", "flow.max_staleness=0",
        "observe.rollouts_every=1", "observe.progress=false"]
PANES = ["tiles", "learning", "health", "lengths", "time", "staleness", "graph", "samples", "all", "about"]
HOSTILE = ["a conversation", "<script>document.title='owned'</script>", "</script><img src=x onerror=\"document.title='owned'\">", "\u0000\u0007\u001b[31m\r", "\u202eevil\u2066\u200f", "x" * 100_000]
# Frames may take longer where other programs compute: the figure is printed, and this is where it is certainly wrong.
LONGEST_TASK = float(os.environ.get("LONGEST_TASK", 250))
shots = os.environ.get("SHOTS")
folder = pathlib.Path(tempfile.mkdtemp())


def run_args(out, *sets):
    return [rollflow, "run", "pipelines/recipes/grpo.toml", "--out", str(out), *(part for one in [*TINY, *sets] for part in ["--set", one])]


@contextlib.contextmanager
def serving(*args, env={}):
    """A process that prints its page's address."""
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env})
    try:
        while not (found := re.search(r"page: (http://\S+)", process.stdout.readline())):
            assert process.poll() is None, f"{args} ended"
        # Nothing waits for a reader.
        reader = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
        yield found[1], process
    finally:
        process.terminate()
        process.wait()
        reader.wait()


def is_shown(browser, pane):
    return browser.evaluate(f"(() => {{ const box = document.getElementById('{pane}')?.getBoundingClientRect(); return !!box && box.height > 0; }})()")


def no_overflow(browser, where):
    wide = browser.evaluate("""(() => { const wide = document.documentElement.clientWidth, scrolls = (node) => node && node !== document.body && (/auto|scroll|hidden/.test(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
      const out = [...document.querySelectorAll("main *, header *, nav *")].filter((node) => node.getBoundingClientRect().right > wide + 1 && !scrolls(node.parentElement) && node.checkVisibility());
      return document.documentElement.scrollWidth > wide ? out.slice(0, 5).map((node) => `${node.tagName}#${node.id}.${node.className} ${node.textContent.slice(0, 40)}`) : []; })()""")
    assert not wide, f"{where}: wider than the page: {wide}"


def checked(browser, where):
    no_overflow(browser, where)
    assert not browser.nameless(), f"{where}: without a name: {browser.nameless()}"
    assert not browser.complaints, f"{where}: {browser.complaints}"
    if shots:
        browser.screenshot(f"{shots}/{where.replace(' ', '-')}.png")


def drawn(browser, name):
    browser.until(f"document.getElementById('folder').textContent === ' › {name}' && document.body.className === 'run' && document.querySelector('#learning-charts svg') && document.querySelector('#list [role=option]') && document.querySelector('.completion') && !drawing")


def panes(browser, address):
    for width in [1280, 390]:
        for dark in [False, True]:
            how = f"{width} {'dark' if dark else 'light'}"
            browser.show(width, dark)
            browser.open(address)
            browser.until("document.querySelectorAll('#runs-table tr').length >= 5")
            checked(browser, f"runs {how}")
            browser.open(f"{address}#run=first")
            drawn(browser, "first")
            missing = [pane for pane in PANES if not is_shown(browser, pane)]
            assert not missing, f"{how}: not shown: {missing}"
            checked(browser, f"run {how}")
            for axis in ["tokens", "seconds"]:
                browser.evaluate(f"$('axis').value = '{axis}'; $('axis').dispatchEvent(new Event('change'))")
                browser.until("!drawing")
                assert browser.evaluate("document.querySelectorAll('#learning-charts svg path').length") > 0, f"{axis}: no curve"
            for colour in ["version", "gap", "entropy", "advantage"]:
                browser.evaluate(f"token_colour.value = '{colour}'; token_colour.dispatchEvent(new Event('change'))")
                browser.until("$('scale').textContent.startsWith(SCALES[token_colour.value].title) && document.querySelector('.completion.chosen .tokens span')")
            browser.evaluate("document.documentElement.style.scrollBehavior = 'auto'; document.querySelector('.tokens').scrollIntoView({ block: 'center' })")
            browser.point(*browser.evaluate("(() => { const box = document.querySelector('.tokens span').getBoundingClientRect(); return [box.x + 2, box.y + 5]; })()"))
            browser.until("/id \\d+ · token \\d+ · version \\d+ · log-probability/.test($('numbers').textContent)")
            checked(browser, f"tokens {how}")
            browser.open(f"{address}#compare=first&compare=second")
            browser.until("document.body.className === 'comparison' && document.querySelectorAll('#compared svg path').length >= 2")
            checked(browser, f"comparison {how}")


def report(browser):
    """The page that a run keeps, which has no server."""
    browser.show(1280, False)
    browser.open(f"file://{folder}/runs/first/report.html")
    browser.until("document.querySelector('#learning-charts svg') && document.querySelector('.completion pre') && !drawing")
    for pane in PANES:
        assert is_shown(browser, pane), pane
    browser.evaluate("$('axis').value = 'tokens'; $('axis').dispatchEvent(new Event('change')); $('older').click()")
    browser.until("/^101–192 of 192/.test($('found').textContent)")
    checked(browser, "report 1280 light")


def preferences(browser, address):
    """A run of pairs without times, after another run whose curves were drawn over time."""
    browser.show(1280, False)
    browser.open(f"{address}#run=first")
    drawn(browser, "first")
    browser.evaluate("$('axis').value = 'seconds'; $('axis').dispatchEvent(new Event('change'))")
    browser.until("!drawing")
    browser.open(f"{address}#run=pairs")
    browser.until("$('folder').textContent === ' › pairs' && document.body.className === 'run' && !drawing && document.querySelector('#learning-charts svg')")
    titles = browser.evaluate("[...document.querySelectorAll('#learning-charts h3')].map((title) => title.textContent)")
    assert {"Evaluation: share that is right", "Evaluation: loss", "Loss"} <= set(titles), titles
    empty = browser.evaluate("[...document.querySelectorAll('.chart')].filter((box) => !box.querySelector('svg')).map((box) => box.textContent)")
    assert not empty, empty
    checked(browser, "pairs 1280 light")


def focus(browser, script, what, shift=False):
    """Moves the focus by the tab key until `script` holds for the element."""
    for _ in range(200):
        if browser.evaluate(f"((at) => {script})(document.activeElement)"):
            return
        browser.key("Tab", shift)
    raise AssertionError(f"the keyboard does not reach {what}")


def keyboard(browser, address):
    browser.show(1280, False)
    browser.open(address)
    browser.until("document.querySelectorAll('#runs-table tr').length >= 5")
    focus(browser, "at.textContent === 'first'", "a run")
    browser.key("Enter")
    drawn(browser, "first")
    focus(browser, "at.id === 'list'", "the samples")
    before = browser.evaluate("document.querySelector('.completion.chosen').dataset.key")
    browser.key("ArrowDown")
    browser.until(f"document.querySelector('.completion.chosen')?.dataset.key !== '{before}'")
    browser.key("Enter")
    browser.until("document.activeElement.closest('.completion.chosen')")
    browser.evaluate("token_colour.value = 'version'; token_colour.dispatchEvent(new Event('change'))")
    browser.until("document.querySelector('.completion.chosen .tokens span')")
    focus(browser, "at.classList.contains('tokens')", "the tokens")
    browser.key("ArrowRight")
    browser.until("/version \\d/.test($('numbers').textContent)")
    focus(browser, "at.textContent === 'All runs'", "the way back", shift=True)
    browser.key("Enter")
    browser.until("document.body.className === 'runs'")
    # A link to a sample shows it, also one that is on no first page.
    last = json.loads((folder / "runs/large/rollouts.jsonl").open().readline())
    key = f"{last['step']}-{last['group']}-{last['index']}"
    browser.open(f"{address}#run=large&sample={key}")
    browser.until(f"document.querySelector('.completion.chosen')?.dataset.key === '{key}'", 120)
    assert not browser.complaints, browser.complaints


def hostile(browser, address):
    browser.show(390, False)
    browser.open(f"{address}#run=hostile")
    drawn(browser, "hostile")
    for at in range(len(HOSTILE)):
        browser.evaluate(f"document.querySelectorAll('#list [role=option]')[{at}].click()")
        time.sleep(0.3)
        no_overflow(browser, f"hostile text {at}")
    shown = browser.evaluate("[...document.querySelectorAll('.completion pre')].map((pre) => pre.textContent)")
    text = "\n".join(shown)
    assert HOSTILE[1] in text and HOSTILE[2] in text and "\\u{202e}evil" in text and "(100000 characters)" in text, text[:500]
    assert not browser.evaluate("document.querySelectorAll('.completion img, .completion script').length")
    roles = browser.evaluate("[...document.querySelectorAll('.completion .role')].map((role) => role.textContent)")
    assert roles == ["assistant", "tool", "assistant"], roles
    assert "add" in browser.evaluate("document.querySelector('.call').textContent")
    assert "owned" not in browser.evaluate("document.title")
    assert not browser.complaints, browser.complaints


def frames(browser, address, server):
    """The large run: time of the server, and the longest task of the browser for each thing that a reader does."""
    browser.show(1280, False)
    longest = {}

    def measured(what, act, seconds=120):
        browser.begin_trace()
        began = time.time()
        act()
        browser.until("!drawing", seconds)
        time.sleep(0.5)
        longest[what] = (browser.longest_frame(), *browser.end_trace(), time.time() - began - 0.5)

    def first():
        browser.open(f"{address}#run=large")
        drawn(browser, "large")

    def scroll():
        for _ in range(40):
            browser.wheel(640, 450, 300)
            time.sleep(0.02)

    def filled(name, value, fits):
        browser.evaluate(f"(() => {{ const input = [...document.querySelectorAll('#filters label')].find((label) => label.firstChild.textContent === '{name}').querySelector('input, select'); input.value = {json.dumps(value)}; input.dispatchEvent(new Event('input')); }})()")
        browser.until(f"{fits}.test($('found').textContent)", 120)

    def coloured():
        browser.evaluate("token_colour.value = 'gap'; token_colour.dispatchEvent(new Event('change'))")
        browser.until("document.querySelectorAll('.tokens').length === document.querySelectorAll('.completion').length && [...document.querySelectorAll('.tokens')].every((box) => box.querySelector('span'))", 60)

    def listed():
        browser.evaluate("$('list').scrollIntoView({ block: 'center' })")
        for _ in range(30):
            browser.wheel(200, 450, 200)
            time.sleep(0.02)
        browser.evaluate("$('older').click()")
        browser.until("/^101–200/.test($('found').textContent)")

    measured("first page, server's index included", first)
    measured("page again", first)
    assert "100,000 samples" in browser.evaluate("$('found').textContent"), browser.evaluate("$('found').textContent")
    measured("scroll", scroll)
    measured("list and next page", listed)
    measured("tokens by gap", coloured)
    measured("filter by reward", lambda: filled("Reward", "0.9", "/1–100 of [\\d,]+ that fit; 100,000/"))
    measured("filter by text", lambda: filled("Contains", "needle", "/fit among|searched/"))
    filled("Contains", "", "/1–100 of [\\d,]+ that fit; 100,000/")
    measured("filter by condition", lambda: filled("Condition", "advantage > 1.9", "/fit among [\\d,]+ of/"))
    measured("curves by time", lambda: browser.evaluate("$('axis').value = 'seconds'; $('axis').dispatchEvent(new Event('change'))"))
    memory = int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{server.pid}/status").read_text())[1]) // 1024
    print(f"{'milliseconds':40} longest frame  longest task  its processor time  seconds in all")
    for what, (frame, clock, processor, seconds) in longest.items():
        print(f"{what:40} {frame:13.0f} {clock:13.0f} {processor:19.0f} {seconds:15.1f}")
    print(f"server: {memory} MiB resident")
    worst = max(processor or clock for _, clock, processor, _ in longest.values())
    assert worst < LONGEST_TASK, f"a task of {worst:.0f} ms; frames should take 50 ms at most"
    assert not browser.complaints, browser.complaints


def steered(browser):
    """The token's form, and a run that is paused and resumed by its buttons."""
    browser.show(1280, False)
    out = folder / "steered"
    args = run_args(out, "train.steps=1000000", "train.schedule={kind='constant'}", "observe.page_token_env='PAGE_TOKEN'", "observe.rollouts_every=100")
    with serving(*args, "--page", "127.0.0.1:0", env={"PAGE_TOKEN": "a-secret"}) as (address, _):
        browser.open(address)
        browser.until("document.body.className === 'token' && document.activeElement.id === 'secret'")
        # A wrong token is the refusal that follows.
        browser.type("wrong")
        browser.key("Enter")
        browser.until("/wrong/.test($('outcome').textContent)")
        checked_name = browser.nameless()
        assert not checked_name, checked_name
        browser.evaluate("$('secret').value = ''; $('secret').focus()")
        browser.type("a-secret")
        browser.key("Enter")
        browser.until("document.body.className === 'run' && !$('steer').hidden && plotted?.moving", 60)
        assert all("401" in complaint for complaint in browser.complaints), browser.complaints
        browser.complaints.clear()
        steps = lambda: (out / "metrics.jsonl").read_text().count("\n")
        browser.evaluate("$('order-pause').focus()")
        browser.key("Enter")
        browser.until("$('connection').textContent === 'paused' && $('order-pause').disabled")
        time.sleep(1)
        taken = steps()
        time.sleep(1)
        assert steps() == taken, "it took a step during a pause"
        browser.evaluate("$('order-resume').focus()")
        browser.key("Enter")
        until(lambda: steps() > taken, "steps after the pause", 30)
        if shots:
            time.sleep(3)
            browser.screenshot(f"{shots}/live.png")
        assert not browser.complaints, browser.complaints


def started(browser):
    """A dashboard's form: a value that is refused, a run that is started, its graph in motion, a change and its end."""
    secret, runs = folder / "token", folder / "started"
    secret.write_text("a-secret")
    with serving(rollflow, "dashboard", str(runs), "--listen", "127.0.0.1:0", "--start", "pipelines/recipes", "--token-file", str(secret)) as (address, _):
        for width in [1280, 390]:
            browser.show(width, False)
            browser.open(address)
            if width == 1280:
                browser.until("document.body.className === 'token' && document.activeElement.id === 'secret'")
                browser.type("a-secret")
                browser.key("Enter")
                browser.until("!$('new-run').hidden")
                browser.complaints.clear()
            browser.until("document.body?.className === 'runs' && !document.getElementById('new-run').hidden")
            focus(browser, "at.id === 'new-run'", "the form")
            browser.key("Enter")
            browser.until("document.body.className === 'start' && $('start-recipe').options.length > 3 && !$('start-run').disabled", 60)
            browser.evaluate("$('start-recipe').value = 'grpo'; $('start-recipe').onchange()")
            browser.until("document.querySelector('[data-key=\"train.steps\"]') && !$('start-run').disabled", 60)
            give = lambda key, value: browser.evaluate(f"(() => {{ const input = document.querySelector('[data-key=\"{key}\"]'); input.value = {json.dumps(value)}; input.dispatchEvent(new Event('change')); }})()")
            give("train.lr", "-1")
            browser.until("$('start-run').disabled && /train.lr/.test($('start-check').textContent)")
            checked(browser, f"form {width}")
            for one in ["train.lr=1e-3", "train.steps=1000000", *TINY[:5], "observe.rollouts_every=1"]:
                give(*one.split("="))
            browser.until("!$('start-run').disabled && $('start-check').textContent !== 'checking …'", 60)
            browser.evaluate(f"$('start-name').value = 'run-{width}'; $('start-name').focus()")
            browser.key("Enter")
            browser.until(f"document.body.className === 'run' && $('folder').textContent === ' › run-{width}' && !$('steer').hidden && plotted?.moving", 90)
            checked(browser, f"started {width}")
            browser.evaluate("$('change-line').focus()")
            browser.type("observe.rollouts_every=2")
            browser.key("Enter")
            browser.until("/^from step \\d+ on: observe.rollouts_every=2$/.test($('changed').textContent)")
            browser.evaluate("confirm = () => true; $('order-stop').focus()")
            browser.key("Enter")
            until(lambda: '"state": "stopped"' in (runs / f"run-{width}/run.json").read_text(), "the end of the run", 60)
            assert not browser.complaints, browser.complaints


def main():
    runs = folder / "runs"
    for name, seed in [("first", 0), ("second", 1)]:
        done = subprocess.run(run_args(runs / name, "train.steps=12", f"seed={seed}", "eval={every=4,samples=2,limit=4}"), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    done = subprocess.run([rollflow, "run", "pipelines/recipes/dpo_pairs.toml", "--out", str(runs / "pairs"), *(part for one in [*TINY[:5], "train.epochs=1", "eval.every=4", "observe.progress=false"] for part in ["--set", one])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (runs / "pairs/timings.jsonl").unlink()
    shutil.copytree(runs / "first", runs / "hostile")
    rows = [json.loads(line) for line in (runs / "first/rollouts.jsonl").read_text().splitlines()[:len(HOSTILE)]]
    rows = [{**row, "group": 0, "index": at, "step": 1, "response": text} for at, (row, text) in enumerate(zip(rows, HOSTILE))]
    # A conversation with a tool.
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]}
    chat = [{"role": "user", "content": "1+2"}, call, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3"}]
    rows[0] |= {"prompt": chat[:1], "metadata": {"conversation": chat, "turns": 2}}
    (runs / "hostile/rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(runs / "first", runs / "large")
    enlarge(runs / "large", steps=10_000, samples=100_000)
    with serving(rollflow, "dashboard", str(runs), "--listen", "127.0.0.1:0") as (address, server):
        checks = {"frames": lambda browser: frames(browser, address, server), "panes": lambda browser: panes(browser, address),
                  "report": report, "preferences": lambda browser: preferences(browser, address), "keyboard": lambda browser: keyboard(browser, address), "hostile": lambda browser: hostile(browser, address), "steered": steered, "started": started}
        for name in sys.argv[2:] or checks:
            with contextlib.closing(Chromium()) as browser:
                checks[name](browser)
            print(f"{name}: ok", flush=True)
    print("the live page: ok")


try:
    main()
finally:
    shutil.rmtree(folder, ignore_errors=True)
