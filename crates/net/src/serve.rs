//! A server in this process, on its one runtime. [`Server::close`] lets responses end; dropping it
//! frees the port and cuts every connection, however slow its client is.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio_util::sync::CancellationToken;

use super::Tasks;

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
        let (address, tasks) = (listener.local_addr()?, Tasks::new()?);
        listener.set_nonblocking(true)?;
        let mut listener = {
            let _runtime = tasks.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let (group, closing) = (tasks.group().clone(), CancellationToken::new());
        let closed = closing.clone();
        tasks.spawn(async move {
            loop {
                let stream = tokio::select! {
                    biased;
                    () = closed.cancelled() => return,
                    // Waits and retries if the machine has no room for a connection.
                    (stream, _) = Listener::accept(&mut listener) => stream,
                };
                // Otherwise each event of a stream waits for the acknowledgement of the one before.
                stream.set_nodelay(true).ok();
                let served =
                    http1::Builder::new().serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes.clone()));
                let closed = closed.clone();
                tokio::spawn(group.member(async move {
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
    use std::time::Duration;

    use axum::routing;

    use super::*;

    #[test]
    fn dropping_a_server_frees_its_port_and_cuts_its_connections() {
        let waits = || async { std::future::pending::<()>().await };
        let routes = Router::new().route("/", routing::get(|| async { "here" })).route("/waits", routing::get(waits));
        let server = Server::start(TcpListener::bind("127.0.0.1:0").unwrap(), routes).unwrap();
        let address = server.address();
        // One is idle, one waits for its answer, one has not finished its request.
        let mut clients: Vec<_> = ["GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET /waits HTTP/1.1\r\nHost: a\r\n\r\n", "GET /"]
            .into_iter()
            .map(|request| {
                let mut stream = std::net::TcpStream::connect(address).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
                stream.write_all(request.as_bytes()).unwrap();
                stream
            })
            .collect();
        let mut page = Vec::new();
        while !page.ends_with(b"here") {
            let mut byte = [0];
            clients[0].read_exact(&mut byte).unwrap();
            page.push(byte[0]);
        }
        drop(server);
        for client in &mut clients {
            // The end of the stream, or a reset; not a timeout.
            let kind = client.read(&mut [0; 64]).map_err(|error| error.kind());
            assert!(matches!(kind, Ok(0) | Err(ErrorKind::ConnectionReset)), "{kind:?}");
        }
        TcpListener::bind(address).unwrap();
    }
}
