//! A server in this process, on its one runtime. Dropping it frees the port and cuts every
//! connection, however slow its client is.

use std::future::Future;
use std::io::{self, ErrorKind, IoSlice};
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Router;
use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::Tasks;
use super::tasks::Lease;

/// A running server; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Server {
    address: SocketAddr,
    tasks: Tasks,
}

impl Server {
    /// Serves `routes` on `listener`. When this returns, connections are accepted.
    pub(crate) fn start(listener: TcpListener, routes: Router) -> io::Result<Self> {
        let (address, tasks) = (listener.local_addr()?, Tasks::new()?);
        listener.set_nonblocking(true)?;
        let listener = {
            let _runtime = tasks.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let stoppable = Stoppable { listener, lease: tasks.lease() };
        tasks.spawn(async move {
            if let Err(error) = axum::serve(stoppable, routes).await {
                tracing::error!(%error, "the server at {address} ended");
            }
        });
        Ok(Server { address, tasks })
    }

    /// Address; with port 0 requested, the assigned port.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The tasks that end with the server.
    pub(crate) fn tasks(&self) -> &Tasks {
        &self.tasks
    }
}

/// A listener whose connections end with a group of tasks.
struct Stoppable {
    listener: tokio::net::TcpListener,
    lease: Lease,
}

impl Listener for Stoppable {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let (stream, from) = Listener::accept(&mut self.listener).await;
        let lease = self.lease.clone();
        (Connection { stream, stopped: Box::pin(lease.stop.clone().cancelled_owned()), _lease: lease }, from)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that breaks when its server ends.
struct Connection {
    stream: TcpStream,
    stopped: Pin<Box<WaitForCancellationFutureOwned>>,
    _lease: Lease,
}

impl Connection {
    /// The stream, unless the server has ended. Wakes the caller when it does.
    fn stream(&mut self, context: &mut Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        match self.stopped.as_mut().poll(context) {
            Poll::Ready(()) => Err(ErrorKind::ConnectionAborted.into()),
            Poll::Pending => Ok(Pin::new(&mut self.stream)),
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.stream(context)?.poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream(context)?.poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream(context)?.poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream(context)?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
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
