//! A server on the loopback that follows a script.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tokio::time::sleep;

static SERVERS: LazyLock<Runtime> = LazyLock::new(|| Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap());

/// Waits for work on the threads of the servers.
pub fn wait_for<T>(work: impl Future<Output = T>) -> T {
    SERVERS.block_on(work)
}

/// A part of a streamed answer.
#[derive(Clone, Debug)]
pub enum Piece {
    /// An event with this data.
    Event(Value),
    /// These bytes.
    Raw(String),
    Pause(u64),
    /// The connection ends.
    Cut,
    /// Nothing more, until the client goes.
    Hang,
}

#[derive(Clone, Debug)]
pub enum Reply {
    Page(u16, String),
    Stream(Vec<Piece>),
    Reset,
    Hang,
}

impl Reply {
    pub fn json(value: Value) -> Self {
        Reply::Page(200, value.to_string())
    }

    /// A whole stream of such events.
    pub fn events(events: impl IntoIterator<Item = Value>) -> Self {
        let done = Piece::Raw("data: [DONE]\n\n".into());
        Reply::Stream(events.into_iter().map(Piece::Event).chain([done]).collect())
    }
}

/// State of a SGLang server, which ends where the real one does.
#[derive(Debug, Default)]
pub struct Sleeper {
    pub label: String,
    pub asleep: Vec<String>,
    pub ended: bool,
    /// Labels that begin so are refused.
    pub refuses: Option<char>,
}

impl Sleeper {
    pub fn answer(&mut self, path: &str, body: &Value) -> Reply {
        let tags = || body["tags"].as_array().into_iter().flatten().map(|tag| tag.as_str().unwrap().to_owned());
        let text = |key: &str| body[key].as_str().unwrap().to_owned();
        match path {
            "/model_info" => return Reply::json(json!({ "model_path": "policy", "weight_version": self.label })),
            "/server_info" => {
                return Reply::json(json!({ "enable_memory_saver": true, "enable_weights_cpu_backup": true }));
            }
            "/update_weight_version" if self.refuses.is_some_and(|refused| text("new_version").starts_with(refused)) => {
                return Reply::Page(400, "not now".into());
            }
            "/update_weight_version" => self.label = text("new_version"),
            "/update_weights_from_disk" => {
                self.ended |= self.asleep.contains(&"weights".to_owned());
                self.label = text("weight_version");
            }
            "/release_memory_occupation" => {
                self.ended |= tags().any(|tag| self.asleep.contains(&tag));
                self.asleep.extend(tags());
            }
            "/resume_memory_occupation" => {
                self.ended |= tags().any(|tag| !self.asleep.contains(&tag));
                self.asleep.retain(|part| tags().all(|tag| tag != *part));
            }
            "/continue_generation" => self.ended |= !self.asleep.is_empty(),
            "/pause_generation" => {}
            _ => return Reply::Page(404, "no".into()),
        }
        Reply::json(json!({ "success": true }))
    }
}

type Script = dyn Fn(&str, &Value) -> Reply + Send + Sync;

pub struct Server {
    pub url: String,
    /// Connections that were made.
    pub connections: Arc<AtomicUsize>,
    /// Clients that went while it said nothing more.
    pub left: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Server {
    /// Answers a path and a body as the script says.
    pub fn new(script: impl Fn(&str, &Value) -> Reply + Send + Sync + 'static) -> Self {
        let listener = SERVERS.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        Server::on(listener, script)
    }

    /// The same at this port.
    pub fn at(port: u16, script: impl Fn(&str, &Value) -> Reply + Send + Sync + 'static) -> Self {
        Server::on(SERVERS.block_on(TcpListener::bind(("127.0.0.1", port))).unwrap(), script)
    }

    /// A SGLang server that sleeps.
    pub fn sleeper(state: &Arc<Mutex<Sleeper>>) -> Self {
        let state = state.clone();
        let listener = SERVERS.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        Server::by(listener, move |path, body| state.lock().unwrap().answer(path, body))
    }

    /// Pages for weights are answered before the script is asked.
    fn on(listener: TcpListener, script: impl Fn(&str, &Value) -> Reply + Send + Sync + 'static) -> Self {
        let label = Mutex::default();
        Server::by(listener, move |path, body| weight_page(path, body, &label).unwrap_or_else(|| script(path, body)))
    }

    fn by(listener: TcpListener, script: impl Fn(&str, &Value) -> Reply + Send + Sync + 'static) -> Self {
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (script, connections) = (Arc::<Script>::from(Box::new(script) as Box<Script>), Arc::<AtomicUsize>::default());
        let (count, left) = (connections.clone(), Arc::<AtomicUsize>::default());
        let gone = left.clone();
        let task = SERVERS.spawn(async move {
            let mut open = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, SeqCst);
                open.spawn(serve(stream, script.clone(), gone.clone()));
            }
        });
        Server { url, connections, left, task }
    }

    pub fn port(&self) -> u16 {
        self.url.rsplit(':').next().unwrap().parse().unwrap()
    }
}

impl Drop for Server {
    /// All connections break.
    fn drop(&mut self) {
        self.task.abort();
        // The port is free when this returns.
        SERVERS.block_on(async {
            while !self.task.is_finished() {
                sleep(Duration::from_millis(1)).await;
            }
        });
    }
}

/// A connection: plain reads and writes, of what the runtime has without more features.
struct Wire {
    stream: TcpStream,
    read: Vec<u8>,
    left: Arc<AtomicUsize>,
}

impl Wire {
    /// More bytes; `None` when the client has gone.
    async fn more(&mut self) -> Option<()> {
        let mut bytes = [0; 4096];
        loop {
            self.stream.readable().await.ok()?;
            match self.stream.try_read(&mut bytes) {
                Ok(0) => return None,
                Ok(count) => {
                    self.read.extend(&bytes[..count]);
                    return Some(());
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
    }

    async fn write(&mut self, text: &str) -> Option<()> {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            self.stream.writable().await.ok()?;
            match self.stream.try_write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
        Some(())
    }

    async fn question(&mut self) -> Option<(String, Value)> {
        let head = loop {
            match self.read.windows(4).position(|four| four == b"\r\n\r\n") {
                Some(end) => break self.read.drain(..end + 4).collect::<Vec<u8>>(),
                None => self.more().await?,
            }
        };
        let head = String::from_utf8(head).ok()?.to_ascii_lowercase();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length:"))
            .map_or(Some(0), |value| value.trim().parse().ok())?;
        while self.read.len() < length {
            self.more().await?;
        }
        let body: Vec<u8> = self.read.drain(..length).collect();
        Some((head.split(' ').nth(1)?.to_owned(), serde_json::from_slice(&body).unwrap_or_default()))
    }

    /// `None` when the connection is over.
    async fn answer(&mut self, reply: Reply) -> Option<()> {
        match reply {
            Reply::Page(status, page) => {
                self.write(&format!("HTTP/1.1 {status} So\r\nContent-Length: {}\r\n\r\n{page}", page.len())).await
            }
            Reply::Reset => None,
            Reply::Hang => self.gone().await,
            Reply::Stream(pieces) => {
                self.write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await?;
                for piece in pieces {
                    match piece {
                        Piece::Event(event) => self.chunk(&format!("data: {event}\n\n")).await?,
                        Piece::Raw(text) => self.chunk(&text).await?,
                        Piece::Pause(millis) => sleep(Duration::from_millis(millis)).await,
                        Piece::Cut => return None,
                        Piece::Hang => return self.gone().await,
                    }
                }
                self.write("0\r\n\r\n").await
            }
        }
    }

    async fn chunk(&mut self, text: &str) -> Option<()> {
        self.write(&format!("{:x}\r\n{text}\r\n", text.len())).await
    }

    async fn gone(&mut self) -> Option<()> {
        while self.more().await.is_some() {}
        self.left.fetch_add(1, SeqCst);
        None
    }
}

async fn serve(stream: TcpStream, script: Arc<Script>, left: Arc<AtomicUsize>) {
    let mut wire = Wire { stream, read: Vec::new(), left };
    // A client that goes hears no more.
    while let Some((path, body)) = wire.question().await {
        if wire.answer(script(&path, &body)).await.is_none() {
            return;
        }
    }
}

/// The pages by which all servers are given weights. Of these they know nothing but the label.
fn weight_page(path: &str, body: &Value, label: &Mutex<Value>) -> Option<Reply> {
    let page = match path.split('?').next()? {
        "/pause" | "/resume" | "/pause_generation" | "/continue_generation" => json!({}),
        "/collective_rpc" => json!({ "results": [null] }),
        "/update_weights_from_disk" => json!({ "success": true }),
        "/update_weight_version" => {
            *label.lock().unwrap() = body["new_version"].clone();
            json!({ "success": true })
        }
        "/weight_info" => json!({ "weight_version": *label.lock().unwrap() }),
        _ => return None,
    };
    Some(Reply::json(page))
}

/// The model that all scripts serve: the next token follows from those before it, and 1 ends an answer.
pub fn next(tokens: &[u32]) -> (u32, f32) {
    let hash = tokens
        .iter()
        .fold(0x9e37_79b9_u64, |hash, token| (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3) ^ (hash >> 29));
    let token = if hash % 11 == 0 { 1 } else { 2 + (hash >> 8) % 14 } as u32;
    (token, -(token as f32) / 8.0)
}

/// What it answers to these tokens.
pub fn answer_to(prompt: &[u32], most: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    while tokens.len() < prompt.len() + most {
        tokens.push(next(&tokens).0);
        if tokens.last() == Some(&1) {
            break;
        }
    }
    tokens.split_off(prompt.len())
}

/// The pages by which a vLLM server, with weights of its version 0.32, is known.
pub fn vllm_page(path: &str) -> Option<Reply> {
    let page = match path {
        "/version" => json!({ "version": "0.32.0" }),
        "/v1/models" => json!({ "data": [{ "id": "policy", "max_model_len": 256 }] }),
        "/openapi.json" => {
            json!({ "paths": { "/inference/v1/generate": {}, "/pause": {}, "/collective_rpc": {}, "/weight_checker": {} } })
        }
        "/health" => return Some(Reply::Page(200, String::new())),
        _ => return None,
    };
    Some(Reply::json(page))
}

/// The stream of one answer, told of each answer that is asked for.
pub fn of_each(pieces: Vec<Piece>, body: &Value) -> Vec<Piece> {
    let samples = body["sampling_params"]["n"].as_u64().unwrap_or(1);
    let of_each = |piece| match piece {
        Piece::Event(event) if event["choices"].is_array() => {
            let of = |index: u64| {
                let mut event = event.clone();
                event["choices"][0]["index"] = index.into();
                Piece::Event(event)
            };
            (0..samples).map(of).collect()
        }
        other => vec![other],
    };
    pieces.into_iter().flat_map(of_each).collect()
}

/// An event of `POST /inference/v1/generate`, as vLLM 0.32 writes it.
pub fn vllm_event(tokens: &[(u32, f32)], finish: Option<&str>, versions: Value) -> Value {
    let content = |(token, log_prob): &(u32, f32)| json!({ "token_id": token, "logprob": log_prob, "rank": 1, "top_logprobs": [{ "token_id": token, "logprob": log_prob, "rank": 1 }] });
    json!({
        "request_id": "generate-tokens-p1", "usage": null, "output_mode": "tokens",
        "choices": [{
            "index": 0, "finish_reason": finish, "stop_reason": null,
            "token_ids": tokens.iter().map(|(token, _)| token).collect::<Vec<_>>(), "routed_experts": null, "sampling_mask": null,
            "weight_versions": versions, "logprobs": { "content": tokens.iter().map(content).collect::<Vec<_>>() }
        }]
    })
}
