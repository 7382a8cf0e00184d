//! The smallest HTTP client: one GET over a socket.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

/// What a server answered.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub content_type: String,
    pub body: String,
}

/// Asks for `path` and reads until the server closes.
pub fn get(address: SocketAddr, path: &str) -> Answer {
    get_as(address, path, &address.to_string())
}

/// Asks for `path` of `host`, which need not be the address.
pub fn get_as(address: SocketAddr, path: &str, host: &str) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").expect("a blank line ends the head");
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let header =
        |name: &str| head.lines().filter_map(|line| line.split_once(": ")).find(|(key, _)| key.eq_ignore_ascii_case(name));
    let content_type = header("content-type").map(|(_, value)| value.to_owned()).unwrap_or_default();
    let length: usize = header("content-length").expect("an answer with a length").1.parse().unwrap();
    assert_eq!(body.len(), length, "the whole body arrived");
    Answer { status, content_type, body: body.to_owned() }
}
