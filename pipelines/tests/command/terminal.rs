//! A terminal for the command to run in, and what is to be seen on it afterwards.

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::running::command;

const COLUMNS: u16 = 160;

/// Runs to the end with both streams on one terminal; gives the exit code and the lines that stand there.
pub fn on_terminal(args: &[&str]) -> (Option<i32>, Vec<String>) {
    let (code, written) = written_on_terminal(args, &[]);
    // Rows enough that nothing scrolls out.
    let mut terminal = vt100::Parser::new(NonZeroU16::new(2000).unwrap(), NonZeroU16::new(COLUMNS).unwrap(), 0);
    terminal.process(written.as_bytes());
    (code, terminal.screen().rows(0, COLUMNS).map(|row| row.trim_end().to_owned()).collect())
}

/// Runs to the end with both streams on one terminal and these variables; gives the exit code and what was written.
pub fn written_on_terminal(args: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let (master, screen) = pair((50, COLUMNS));
    let mut command = command(args);
    command.env("TERM", "xterm").env_remove("NO_COLOR").envs(variables.iter().copied());
    let mut child = command.stdout(screen.try_clone().unwrap()).stderr(screen).spawn().unwrap();
    // The command keeps its copies of the streams, with which the last write would never be the last.
    drop(command);
    // Reading fails when the last copy of the streams is closed.
    let (mut master, mut written, mut part) = (File::from(master), Vec::new(), [0; 4096]);
    while let Ok(read @ 1..) = master.read(&mut part) {
        written.extend_from_slice(&part[..read]);
    }
    (child.wait().unwrap().code(), String::from_utf8(written).unwrap())
}

/// Both ends of a new terminal with so many rows and columns.
fn pair(size: (u16, u16)) -> (OwnedFd, File) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    // A command that held this end would keep its terminal open.
    fcntl_setfd(&master, FdFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    resize(&master, size);
    let name = ptsname(&master, Vec::new()).unwrap();
    let path = std::ffi::OsStr::from_bytes(name.to_bytes());
    (master, File::options().read(true).write(true).open(path).unwrap())
}

fn resize(master: &OwnedFd, (rows, columns): (u16, u16)) {
    tcsetwinsize(master, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
}

/// Starts the command in its own session, with all streams on `screen`.
fn session(options: &[&str], args: &[&str], variables: &[(&str, &str)], screen: &File) -> Child {
    let plain = command(args);
    let mut command = Command::new("setsid");
    command.args(options).arg(plain.get_program()).args(plain.get_args()).current_dir(plain.get_current_dir().unwrap());
    command.env("TERM", "xterm-256color").env_remove("NO_COLOR").envs(variables.iter().copied());
    let [input, out, error] = [(); 3].map(|()| screen.try_clone().unwrap());
    command.stdin(input).stdout(out).stderr(error).spawn().unwrap()
}

/// Closes the command's terminal when it has written `text`, without a signal; gives the exit code.
pub fn after_its_terminal_closed(args: &[&str], text: &str) -> Option<i32> {
    let (master, screen) = pair((24, 80));
    let mut child = session(&[], args, &[], &screen);
    let (mut master, mut written, mut part) = (File::from(master), String::new(), [0; 4096]);
    while !written.contains(text) {
        let read = master.read(&mut part).unwrap();
        written += &String::from_utf8_lossy(&part[..read]);
    }
    drop(master);
    ended(&mut child)
}

/// Waits for the end; gives the exit code.
fn ended(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("it never ended");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A command that runs on its own terminal, whose keys are pressed and whose screen is looked at.
pub struct Terminal {
    child: Child,
    master: OwnedFd,
    screen: File,
    seen: Arc<Mutex<(vt100::Parser, Vec<u8>)>>,
}

impl Terminal {
    /// Starts the command on a terminal with so many rows and columns.
    pub fn start(args: &[&str], variables: &[(&str, &str)], size: (u16, u16)) -> Self {
        let (master, screen) = pair(size);
        // Its controlling terminal is this one, and not that of the tests.
        let child = session(&["--ctty"], args, variables, &screen);
        let seen = Arc::new(Mutex::new((
            vt100::Parser::new(NonZeroU16::new(size.0).unwrap(), NonZeroU16::new(size.1).unwrap(), 0),
            Vec::new(),
        )));
        let (mut from, to) = (File::from(master.try_clone().unwrap()), seen.clone());
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(read @ 1..) = from.read(&mut part) {
                let (parser, written) = &mut *to.lock().unwrap();
                parser.process(&part[..read]);
                written.extend_from_slice(&part[..read]);
            }
        });
        Terminal { child, master, screen, seen }
    }

    /// Text on the screen.
    fn shown(&self) -> String {
        self.seen.lock().unwrap().0.screen().contents()
    }

    /// All that the command has written.
    pub fn written(&self) -> String {
        String::from_utf8(self.seen.lock().unwrap().1.clone()).unwrap()
    }

    /// Waits until `text` stands on the screen.
    pub fn until_shows(&mut self, text: &str) {
        self.wait(text, |terminal| terminal.shown().contains(text));
    }

    fn wait(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !done(self) {
            assert!(Instant::now() < deadline, "it never came to {what:?}:\n{}", self.shown());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Presses keys.
    pub fn press(&mut self, keys: &str) {
        File::from(self.master.try_clone().unwrap()).write_all(keys.as_bytes()).unwrap();
    }

    /// Gives the terminal another number of rows and columns.
    pub fn resize(&mut self, size: (u16, u16)) {
        let (rows, columns) = (NonZeroU16::new(size.0).unwrap(), NonZeroU16::new(size.1).unwrap());
        self.seen.lock().unwrap().0.screen_mut().set_size(rows, columns);
        resize(&self.master, size);
    }

    /// As an init system does.
    pub fn terminate(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
    }

    /// Whether the command has changed what a shell relies on: echo and lines, the screen, the cursor.
    pub fn is_taken(&self) -> bool {
        let modes = tcgetattr(&self.screen).unwrap().local_modes;
        let seen = self.seen.lock().unwrap();
        let screen = seen.0.screen();
        !modes.contains(LocalModes::ECHO | LocalModes::ICANON) || screen.alternate_screen() || screen.hide_cursor()
    }

    /// Waits for its end, and until all that it wrote is seen; gives the exit code.
    pub fn end(&mut self) -> Option<i32> {
        let code = ended(&mut self.child);
        let mark = "the end";
        self.screen.write_all(mark.as_bytes()).unwrap();
        self.wait(mark, |terminal| terminal.seen.lock().unwrap().1.ends_with(mark.as_bytes()));
        code
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}
