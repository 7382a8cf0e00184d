//! `top`: a run on a terminal, from its folder and from its page. Texts stay data, orders need a token, and the terminal is
//! given back.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use serde_json::Value;

use crate::live_page::address;
use crate::running::{Ended, GRPO, Running, finished, read, rollflow, rollflow_with, run_args};
use crate::tailing::rewrite_rollouts;
use crate::terminal::{Terminal, after_its_terminal_closed};

const ENDLESS: [&str; 4] = ["train.steps=1000000", "train.target_reward=9", "flow.max_staleness=1", "observe.rollouts_every=1"];
const HOSTILE: &str = "a\x1b[2J\x1b]0;title\x07\u{9b}31m\u{202e}b";

/// One frame, which must be within its width and have no control characters.
fn once(args: &[&str]) -> String {
    let Ended { code, out, err } = rollflow(&[&["top"], args, &["--once"]].concat());
    assert_eq!(code, Some(0), "{err}");
    for line in out.lines() {
        assert!(!line.chars().any(char::is_control) && line.chars().count() <= 80, "{line:?}");
    }
    out
}

/// A run with a page that trains until it is ended.
fn endless(run: &Path, sets: &[&str], variables: &[(&str, &str)]) -> (Running, SocketAddr) {
    let sets = [&ENDLESS[..], sets].concat();
    let args = [run_args(GRPO, run, &sets), vec!["--page", "127.0.0.1:0"]].concat();
    let mut running = Running::start_with(&args, variables);
    let address = address(&mut running);
    running.until("it trained", |_| read(&run.join("metrics.jsonl")).lines().count() >= 3);
    (running, address)
}

#[test]
fn a_finished_run_is_shown_from_its_files_on_80_columns_and_24_lines() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    finished(&run, &["observe.rollouts_every=1"]);
    let path = run.to_str().unwrap();
    let overview = once(&[path]);
    assert!(overview.lines().count() <= 24 && overview.contains("grpo · finished · step 3/3"), "{overview}");
    for part in ["prompts", "generate", "train", "time by state", "reward", "generated tok/s", "█ busy", "bottleneck"] {
        assert!(overview.contains(part), "{part}: {overview}");
    }
    let learning = once(&[path, "--pane", "learning"]);
    assert!(learning.contains("reward_mean") && learning.contains("entropy_nats"), "{learning}");
    let ledger = once(&[path, "--pane", "engines"]);
    assert!(ledger.contains("Tokens: ") && ledger.contains("trained") && ledger.contains("prompt ledger"), "{ledger}");
    let samples = once(&[path, "--pane", "samples"]);
    assert!(samples.contains("completion") && samples.contains("Prompt") && samples.contains("advantage"), "{samples}");
    let wide = rollflow(&["top", path, "--once", "--width", "140", "--height", "40"]).out;
    assert!(wide.lines().count() <= 40 && wide.lines().any(|line| line.chars().count() > 80), "{wide}");
}

#[test]
fn a_running_run_is_shown_from_its_folder_with_the_flow_of_its_page() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("mine");
    let (running, address) = endless(&run, &[], &[]);
    let (url, path) = (format!("http://{address}"), run.to_str().unwrap());
    for source in [path, &url] {
        let frame = once(&[source]);
        assert!(frame.contains("mine · grpo · running · step ") && frame.contains(" live"), "{source}: {frame}");
        assert!(frame.contains("→generate") && frame.contains("/64") && frame.contains("weights v"), "{source}: {frame}");
        assert!(once(&[source, "--pane", "engines"]).contains("generated"), "{source}");
        assert!(once(&[source, "--pane", "learning"]).contains("reward_mean"), "{source}");
        assert!(once(&[source, "--pane", "samples"]).contains("completion"), "{source}");
    }
    running.interrupt();
    assert_eq!(running.end(), Some(0));
    assert!(once(&[path]).contains("grpo · drained"), "the files remain");
}

#[test]
fn a_running_run_without_a_page_or_its_token_is_shown_from_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let [bare, locked] = ["bare", "locked"].map(|name| folder.path().join(name));
    let mut running = Running::start(&run_args(GRPO, &bare, &ENDLESS));
    running.until("it trained", |_| read(&bare.join("timings.jsonl")).contains("stage_train"));
    let frame = once(&[bare.to_str().unwrap()]);
    assert!(frame.contains("running") && frame.contains("files only") && frame.contains("--page"), "{frame}");
    assert!(frame.contains("prompts") && !frame.contains("→generate"), "{frame}");
    let (_locked, _) = endless(&locked, &["observe.page_token_env='PAGE'"], &[("PAGE", "a-secret")]);
    let path = locked.to_str().unwrap();
    let frame = once(&[path]);
    assert!(frame.contains("not connected") && frame.contains("token: give it with --token-env"), "{frame}");
    let with = rollflow_with(&["top", path, "--once"], &[("PAGE", "a-secret")]);
    assert!(with.out.contains("→generate"), "the variable of the recipe: {}", with.out);
}

#[test]
fn names_and_addresses_that_lead_nowhere_are_errors_with_advice() {
    let folder = tempfile::tempdir().unwrap();
    finished(&folder.path().join("runs/one"), &[]);
    let mut page = Running::start(&["dashboard", folder.path().to_str().unwrap(), "--listen", "127.0.0.1:0"]);
    let url = format!("http://{}", address(&mut page));
    assert!(once(&[&url]).contains("one · grpo · finished"));
    assert!(once(&[&url, "--run", "runs/one"]).contains("finished · step 3/3"));
    let run = folder.path().join("runs/one");
    for (args, code, advice) in [
        (vec![url.as_str(), "--once", "--run", "two"], 2, "no run \"two\"; it has runs/one"),
        (vec![run.to_str().unwrap()], 2, "are no terminal; --once prints one frame, and rollflow tail"),
        (vec![folder.path().to_str().unwrap(), "--once"], 2, "holds no run"),
        (vec![run.to_str().unwrap(), "--once", "--run", "one"], 2, "leave it out for a folder"),
        (vec!["http://127.0.0.1:1", "--once"], 1, "check that the server runs"),
        (vec!["http://me:hunter2@127.0.0.1", "--once"], 1, "a name or a password"),
    ] {
        let ended = rollflow(&[vec!["top"], args.clone()].concat());
        assert_eq!(ended.code, Some(code), "{args:?}: {}", ended.err);
        assert!(ended.err.contains(advice) && !ended.err.contains("hunter2"), "{args:?}: {}", ended.err);
    }
}

#[test]
fn texts_of_models_reach_no_terminal_as_commands() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    finished(&run, &["observe.rollouts_every=1"]);
    rewrite_rollouts(&run, &[("response", HOSTILE.into()), ("prompt", HOSTILE.into())]);
    let path = run.to_str().unwrap();
    assert!(once(&[path, "--pane", "samples"]).contains("a\\u{1b}[2J\\u{1b}]0;title\\u{7}\\u{9b}31m\\u{202e}b"));
    let mut terminal = Terminal::start(&["top", path, "--pane", "samples"], &[], (24, 80));
    terminal.until_shows("\\u{1b}[2J");
    terminal.press("q");
    assert_eq!(terminal.end(), Some(0));
    let written = terminal.written();
    assert!(!written.contains("\x1b]0;") && !written.contains(['\u{9b}', '\u{202e}', '\x07']), "{written:?}");
}

/// A server that answers every request with this page.
fn server(page: impl Fn(&mut dyn Write) -> std::io::Result<()> + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _request = stream.read(&mut [0; 4096]);
            let head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n";
            let _closed = stream.write_all(head).and_then(|()| page(&mut stream));
        }
    });
    format!("http://{address}")
}

#[test]
fn a_page_of_another_kind_or_without_an_end_is_an_error() {
    let endless = server(|stream| {
        loop {
            stream.write_all(&[b' '; 1 << 16])?;
        }
    });
    let ended = rollflow(&["top", &endless, "--once"]);
    assert!(ended.code == Some(1) && ended.err.contains("longer than 64 MiB"), "{}", ended.err);
    let other = server(|stream| stream.write_all(format!("<html>{HOSTILE}").as_bytes()));
    let ended = rollflow(&["top", &other, "--once"]);
    assert!(ended.code == Some(1) && ended.err.contains("is not that of a live page"), "{}", ended.err);
    let named = format!("[{{\"name\":{},\"state\":\"running\"}}]", Value::from(HOSTILE));
    let named = server(move |stream| stream.write_all(named.as_bytes()));
    let ended = rollflow(&["top", &named, "--once", "--run", "mine"]);
    assert!(ended.code == Some(2) && ended.err.contains("it has a\\u{1b}[2J") && !ended.err.contains('\x1b'), "{}", ended.err);
    assert!(once(&[&named]).contains("not connected"), "a stream of something else");
}

#[test]
fn keys_switch_panes_give_orders_with_a_token_and_give_the_terminal_back() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("mine");
    let token = ("PAGE", "a-secret");
    let (mut running, address) = endless(&run, &["observe.page_token_env='PAGE'", "checkpoint.every=0"], &[token]);
    let url = format!("http://{address}");
    let mut terminal = Terminal::start(&["top", &url, "--token-env", "PAGE"], &[token], (24, 80));
    terminal.until_shows("→generate");
    assert!(terminal.is_taken());
    for (key, shown) in [("2", "reward_mean"), ("\t", "Tokens: "), ("4", "advantage"), ("?", "switch panes"), (" ", "advantage")]
    {
        terminal.press(key);
        terminal.until_shows(shown);
    }
    terminal.press("1p");
    terminal.until_shows("paused");
    terminal.press("c");
    running.until("it saved", |_| {
        fs::read_dir(run.join("checkpoints"))
            .is_ok_and(|all| all.flatten().any(|one| one.file_name().to_string_lossy().starts_with("step_")))
    });
    terminal.resize((40, 140));
    terminal.press("r");
    terminal.until_shows("ordered: resume");
    terminal.press("d");
    terminal.until_shows("save and end the run? y/n");
    terminal.press("n");
    terminal.until_shows("not ordered: drain");
    terminal.press("d");
    terminal.until_shows("y/n");
    terminal.press("y");
    assert_eq!(running.end(), Some(0));
    terminal.until_shows("not connected");
    terminal.press("q");
    assert_eq!(terminal.end(), Some(0));
    assert!(!terminal.is_taken(), "raw mode, alternate screen and hidden cursor are undone");
}

#[test]
fn without_a_token_orders_say_what_they_need_and_a_signal_gives_the_terminal_back() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("mine");
    let (mut running, address) = endless(&run, &[], &[]);
    let mut terminal = Terminal::start(&["top", &format!("http://{address}")], &[("NO_COLOR", "1")], (24, 80));
    terminal.until_shows("→generate");
    terminal.press("d");
    terminal.until_shows("observe.page_token_env");
    terminal.terminate();
    assert_eq!(terminal.end(), Some(0));
    assert!(!terminal.is_taken() && !running.has_ended());
    assert!(!terminal.written().contains("\x1b[38;"), "no colours");
    let mut terminal = Terminal::start(&["top", run.to_str().unwrap()], &[], (24, 80));
    terminal.until_shows("→generate");
    terminal.press("\x03");
    assert_eq!(terminal.end(), Some(0));
    assert!(!terminal.is_taken() && terminal.written().contains("\x1b[38;"), "Ctrl-C, and colours");
}

#[test]
fn a_terminal_that_is_closed_ends_the_view() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    finished(&run, &[]);
    assert_eq!(after_its_terminal_closed(&["top", run.to_str().unwrap()], "time"), Some(1));
}
