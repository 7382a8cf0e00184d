//! A server in this process, on its one runtime. [`Server::close`] lets responses end; dropping it
//! frees the port and cuts every connection, however slow its client is.
//!
//! Clients need no token to connect, so connections are bounded: in number, and in the time without
//! a request.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, getrlimit};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::Tasks;

/// Bounds of a server's connections.
#[derive(Clone, Copy)]
struct Limits {
    /// Connections at a time. Further ones wait until one ends.
    connections: usize,
    /// Longest wait for the head of a request, from the connection's beginning or its last response.
    /// [`Client`](super::Client) closes idle connections sooner.
    head: Duration,
}

impl Limits {
    /// A server takes a third of the files that this process may open: its logs and other servers take the
    /// rest. Of 4096 that is room for as many requests as `rollflow serve` queues, and for control.
    fn of_process() -> Self {
        const MOST: usize = 8192;
        let files = getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok());
        Limits { connections: files.map_or(MOST, |files| (files / 3).clamp(1, MOST)), head: Duration::from_secs(30) }
    }
}

/// Most connections of a server at a time, by the files that this process may open.
pub fn most_connections() -> usize {
    Limits::of_process().connections
}

/// A running server; dropping it ends it.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    tasks: Tasks,
    closing: CancellationToken,
}

impl Server {
    /// Serves `routes` on `listener`. When this returns, connections are accepted.
    pub fn start(listener: TcpListener, routes: Router) -> io::Result<Self> {
        Server::start_within(Limits::of_process(), listener, routes)
    }

    fn start_within(limits: Limits, listener: TcpListener, routes: Router) -> io::Result<Self> {
        let (address, tasks) = (listener.local_addr()?, Tasks::new()?);
        listener.set_nonblocking(true)?;
        let mut listener = {
            let _runtime = tasks.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let (group, closing) = (tasks.group().clone(), CancellationToken::new());
        let closed = closing.clone();
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(limits.head);
        let room = Arc::new(Semaphore::new(limits.connections));
        tasks.spawn(async move {
            loop {
                let accepted = async {
                    let place = room.clone().acquire_owned().await;
                    // Waits and retries if the machine has no room for a connection.
                    (Listener::accept(&mut listener).await.0, place)
                };
                let (stream, place) = tokio::select! {
                    biased;
                    () = closed.cancelled() => return,
                    accepted = accepted => accepted,
                };
                // Otherwise each event of a stream waits for the acknowledgement of the one before.
                stream.set_nodelay(true).ok();
                let served = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes.clone()));
                let closed = closed.clone();
                tokio::spawn(group.member(async move {
                    let _place = place;
                    let mut served = pin!(served);
                    let ended = tokio::select! {
                        biased;
                        ended = served.as_mut() => ended,
                        () = closed.cancelled() => {
                            served.as_mut().graceful_shutdown();
                            served.await
                        }
                    };
                    if let Err(error) = ended {
                        tracing::trace!(%error, "a connection to {address} broke");
                    }
                }));
            }
        });
        Ok(Server { address, tasks, closing })
    }

    /// Address; with port 0 requested, the assigned port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Frees the port, ends idle connections, and each other one after its response.
    pub fn close(&self) {
        self.closing.cancel();
    }

    /// Returns true if the server was closed and all its connections and tasks have ended.
    pub fn has_ended(&self) -> bool {
        self.closing.is_cancelled() && self.tasks.group().is_empty()
    }

    /// The tasks that end with the server.
    pub fn tasks(&self) -> &Tasks {
        &self.tasks
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream;

    use axum::routing;

    use super::*;

    fn server(limits: Limits) -> Server {
        let waits = || async { std::future::pending::<()>().await };
        let routes = Router::new().route("/", routing::get(|| async { "here" })).route("/waits", routing::get(waits));
        Server::start_within(limits, TcpListener::bind("127.0.0.1:0").unwrap(), routes).unwrap()
    }

    /// A connection that has sent this.
    fn client(address: SocketAddr, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    /// Reads a response, whose page is "here".
    fn read_page(stream: &mut TcpStream) {
        let mut page = Vec::new();
        while !page.ends_with(b"here") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            page.push(byte[0]);
        }
    }

    /// The end of the stream, or a reset; not a timeout.
    fn assert_cut(stream: &mut TcpStream) {
        let kind = stream.read(&mut [0; 64]).map_err(|error| error.kind());
        assert!(matches!(kind, Ok(0) | Err(ErrorKind::ConnectionReset)), "{kind:?}");
    }

    const REQUEST: &str = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";

    #[test]
    fn dropping_a_server_frees_its_port_and_cuts_its_connections() {
        let server = server(Limits::of_process());
        let address = server.address();
        // One is idle, one waits for its answer, one has not finished its request.
        let mut clients = [REQUEST, "GET /waits HTTP/1.1\r\nHost: a\r\n\r\n", "GET /"].map(|request| client(address, request));
        read_page(&mut clients[0]);
        drop(server);
        clients.iter_mut().for_each(assert_cut);
        TcpListener::bind(address).unwrap();
    }

    #[test]
    fn connections_beyond_a_servers_limit_wait_until_another_ends() {
        let server = server(Limits { connections: 1, head: Duration::from_secs(3600) });
        let mut first = client(server.address(), REQUEST);
        read_page(&mut first);
        let mut second = client(server.address(), REQUEST);
        // The server would have accepted it meanwhile.
        for _ in 0..20 {
            first.write_all(REQUEST.as_bytes()).unwrap();
            read_page(&mut first);
        }
        second.set_nonblocking(true).unwrap();
        assert_eq!(second.read(&mut [0; 64]).map_err(|error| error.kind()), Err(ErrorKind::WouldBlock));
        second.set_nonblocking(false).unwrap();
        drop(first);
        read_page(&mut second);
    }

    #[test]
    fn a_connection_without_a_whole_request_is_cut_and_its_place_is_free() {
        let server = server(Limits { connections: 1, head: Duration::from_millis(50) });
        let mut silent = ["", "GET /"].map(|request| client(server.address(), request));
        let mut idle = client(server.address(), REQUEST);
        read_page(&mut idle);
        read_page(&mut client(server.address(), REQUEST));
        silent.iter_mut().chain([&mut idle]).for_each(assert_cut);
    }
}
