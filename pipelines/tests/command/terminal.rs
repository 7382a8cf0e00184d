//! A terminal for the command to run in, and what is to be seen on it afterwards.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::running::command;

const COLUMNS: u16 = 160;

/// Runs to the end with both streams on one terminal; gives the exit code and the lines that stand there.
pub fn on_terminal(args: &[&str]) -> (Option<i32>, Vec<String>) {
    let (code, written) = written_on_terminal(args, &[]);
    (code, show(&written))
}

/// Runs to the end with both streams on one terminal and these variables; gives the exit code and what was written.
pub fn written_on_terminal(args: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    tcsetwinsize(&master, Winsize { ws_row: 50, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let path = std::ffi::OsStr::from_bytes(name.to_bytes());
    let screen = File::options().read(true).write(true).open(path).unwrap();
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

/// As much of a terminal as indicatif asks for.
fn show(written: &str) -> Vec<String> {
    let (mut rows, mut row, mut column) = (vec![Vec::new()], 0_usize, 0_usize);
    let mut chars = written.chars();
    while let Some(char) = chars.next() {
        match char {
            '\r' => column = 0,
            '\n' => row += 1,
            '\x1b' => {
                let mut number = String::new();
                let action = chars.by_ref().skip(1).find(|&char| {
                    number.push(char);
                    char.is_ascii_alphabetic()
                });
                number.pop();
                let count = number.parse().unwrap_or(1);
                match action {
                    Some('A') => row = row.saturating_sub(count),
                    Some('B') => row += count,
                    Some('K') if number == "2" => rows[row].clear(),
                    Some('K') => rows[row].truncate(column),
                    _ => {}
                }
            }
            char => {
                if column == usize::from(COLUMNS) {
                    (row, column) = (row + 1, 0);
                    rows.resize(rows.len().max(row + 1), Vec::new());
                }
                let row = &mut rows[row];
                row.resize(row.len().max(column + 1), ' ');
                row[column] = char;
                column += 1;
            }
        }
        rows.resize(rows.len().max(row + 1), Vec::new());
    }
    rows.into_iter().map(|row| row.into_iter().collect::<String>().trim_end().to_owned()).collect()
}
