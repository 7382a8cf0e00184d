//! `rollflow serve` for clients that leave, name their requests, or name the server. Law F1.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use rollflow::observe::Metric;
use serde_json::json;

use crate::asking::tiny_run;
use crate::model_serving::{LIMIT, Server};
use crate::support::http::get_as;

/// Address of a server on this machine.
fn address(server: &Server) -> SocketAddr {
    let (_, port) = server.url.rsplit_once(':').unwrap();
    SocketAddr::from(([127, 0, 0, 1], port.parse().unwrap()))
}

#[test]
fn texts_of_clients_that_left_in_a_pause_are_not_scored() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(&tiny_run(folder.path(), &[]), &["--slots", "2", "--max-queue", "6"]);
    server.ask("/pause_generation", &json!({"mode": "in_place"}));
    // One completion is in work, so that the server never sleeps.
    let mut events = server.stream("/generate", &json!({"text": "3+4=", "stream": true, "sampling_params": {}}));
    server.until("its completion waits", |server| server.metric(Metric::ServedOpen, &[]) == 1.0);
    let in_work = |server: &Server| server.refused("/release_memory_occupation", &json!({}));
    let text = json!({
        "text": "3+4=", "return_logprob": true, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0},
    });
    let text = text.to_string();
    let ask = || {
        let mut client = TcpStream::connect(address(&server)).unwrap();
        let head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length:";
        write!(client, "{head} {}\r\n\r\n{text}", text.len()).unwrap();
        client
    };
    // A text that comes while the server tries to sleep is refused.
    let mut clients = vec![ask()];
    let deadline = Instant::now() + LIMIT;
    while in_work(&server).contains("1 completions and 0 texts") {
        assert!(Instant::now() < deadline, "no text waits");
        clients.push(ask());
    }
    drop(clients);
    server.until("texts of clients that left are dropped", |server| in_work(server).contains("1 completions and 0 texts"));
    server.ask("/continue_generation", &json!({}));
    while server.next(&mut events).is_some() {}
}

#[test]
fn each_prompt_of_a_request_is_aborted_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&tiny_run(folder.path(), &[]), &["--slots", "2"]);
    let mut body = json!({
        "text": ["3+4=", "1+1="], "rid": ["a", "b"], "stream": true,
        "sampling_params": {"max_new_tokens": 50, "ignore_eos": true},
    });
    server.ask("/pause_generation", &json!({"mode": "in_place"}));
    let mut events = server.stream("/generate", &body);
    server.ask("/abort_request", &json!({"rid": "b"}));
    server.ask("/continue_generation", &json!({}));
    let mut ends = Vec::new();
    while let Some(event) = server.next(&mut events) {
        let meta = &event["meta_info"];
        if meta["finish_reason"].is_object() {
            ends.push((meta["id"].clone(), meta["finish_reason"]["type"].clone()));
        }
    }
    assert_eq!(ends, [(json!("b"), json!("abort")), (json!("a"), json!("length"))]);
    body["rid"] = json!(["a"]);
    assert!(server.refused("/generate", &body).contains("`rid` lists 1 names for 2 prompts"));
}

/// No web page can reach a server on a loopback address by a name that points there (DNS rebinding).
#[test]
fn without_a_token_a_server_answers_to_any_name_only_where_other_hosts_can_reach_it() {
    let folder = tempfile::tempdir().unwrap();
    let run = tiny_run(folder.path(), &[]);
    for (listen, status) in [("127.0.0.1:0", 403), ("0.0.0.0:0", 200)] {
        let server = Server::start_at(listen, &run, &["--without-token"], None);
        let answer = get_as(address(&server), "/health", "gpu1:30000");
        assert_eq!(answer.status, status, "{listen}: {}", answer.body);
        assert_eq!(get_as(address(&server), "/health", "localhost").status, 200, "{listen}");
    }
}
