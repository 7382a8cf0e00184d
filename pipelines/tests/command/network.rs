//! The command and the network: TLS, proxies, and outputs that take nothing.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use axum::{Router, routing};
use rollflow::engine::settings::{Engine, EngineKind};
use rollflow::recipe::Net;
use rollflow_pipelines::assemble::engines;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::fork_server::{BINARY, output};
use super::running::rollflow as offline;

#[path = "../../../tests/support/tls.rs"]
mod tls;

use tls::{Authority, proxy, serve};

const RECIPE: &str = "pipelines/recipes/grpo_vllm.toml";

pub fn rollflow(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(BINARY);
    for name in
        ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"]
    {
        command.env_remove(name);
    }
    output(command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).args(args).envs(variables.iter().copied()))
}

pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// What `rollflow engine status` asks of a vLLM server.
fn vllm() -> Router {
    let paths = ["/inference/v1/generate", "/pause", "/collective_rpc"].map(|path| (path.to_owned(), json!({})));
    let page = |page: Value| routing::get(move || async move { page.to_string() });
    Router::new()
        .route("/health", routing::get(|| async {}))
        .route("/version", page(json!({ "version": "0.33.0" })))
        .route("/v1/models", page(json!({ "data": [{ "id": "policy", "max_model_len": 64 }] })))
        .route("/weight_info", page(json!({ "weight_version": "7" })))
        .route("/openapi.json", page(json!({ "paths": BTreeMap::from(paths) })))
}

#[test]
fn servers_are_asked_with_the_token_that_the_recipe_names() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let heard = std::thread::spawn(move || {
        let lines = BufReader::new(listener.accept().unwrap().0).lines();
        lines.map(Result::unwrap).take_while(|line| !line.is_empty()).collect::<Vec<_>>()
    });
    // A variable that every machine has.
    let of = Engine { kind: EngineKind::Vllm, token_env: Some("HOME".to_owned()), ..Engine::default() };
    let engine = engines::engine(&of, &Net::default(), &url).unwrap();
    // It hangs up without an answer.
    let _unwell = engines::tasks().unwrap().block_on(engine.healthy(Duration::from_secs(5)));
    assert!(heard.join().unwrap().contains(&format!("authorization: Bearer {}", std::env::var("HOME").unwrap())));
}

#[test]
fn a_tls_server_is_trusted_by_the_recipes_authority_or_the_environments_and_by_no_other() {
    let (runtime, folder) = (Runtime::new().unwrap(), tempfile::tempdir().unwrap());
    let authority = Authority::new(folder.path());
    let address = runtime.block_on(serve(authority.acceptor(&["localhost"], &[]), vllm()));
    let (url, file) = (format!("https://localhost:{}", address.port()), authority.file.to_str().unwrap());
    let engine = format!("engine={{kind='vllm',urls=['{url}']}}");
    let by_recipe = rollflow(&["engine", "status", RECIPE, "--set", &engine, "--set", &format!("net.ca_file='{file}'")], &[]);
    assert!(by_recipe.status.success() && said(&by_recipe).contains("vLLM 0.33.0"), "{}", said(&by_recipe));
    let by_environment = rollflow(&["engine", "status", "--kind", "vllm", &url], &[("SSL_CERT_FILE", file)]);
    assert!(by_environment.status.success(), "{}", said(&by_environment));
    let other = Authority::new(tempfile::tempdir_in(folder.path()).unwrap().keep().as_path());
    let refused = rollflow(&["engine", "status", "--kind", "vllm", &url], &[("SSL_CERT_FILE", other.file.to_str().unwrap())]);
    let refused = (refused.status.code(), said(&refused));
    let named =
        ["certificate of localhost is not trusted", "net.ca_file", "SSL_CERT_FILE"].iter().all(|part| refused.1.contains(part));
    assert!(refused.0 == Some(1) && named, "{}", refused.1);
    let missing = rollflow(&["check", RECIPE, "--set", "net.ca_file='no/such.pem'"], &[]);
    assert!(missing.status.code() == Some(2) && said(&missing).contains("`net.ca_file` is no/such.pem"), "{}", said(&missing));
}

#[test]
fn a_proxy_of_the_environment_is_asked_for_a_tunnel_unless_no_proxy_names_the_host() {
    let (runtime, folder) = (Runtime::new().unwrap(), tempfile::tempdir().unwrap());
    let authority = Authority::new(folder.path());
    let acceptor = authority.acceptor(&["models.test", "localhost"], &[]);
    let server = runtime.block_on(serve(acceptor, vllm()));
    let (proxy, asked) = runtime.block_on(proxy(server));
    let (proxy, file) = (format!("http://{proxy}"), authority.file.to_str().unwrap());
    let variables = [("HTTPS_PROXY", proxy.as_str()), ("SSL_CERT_FILE", file)];
    let through = rollflow(&["engine", "status", "--kind", "vllm", "https://models.test"], &variables);
    assert!(through.status.success(), "{}", said(&through));
    let tunnels = std::mem::take(&mut *asked.lock().unwrap());
    assert!(!tunnels.is_empty() && tunnels.iter().all(|line| line == "CONNECT models.test:443 HTTP/1.1"), "{tunnels:?}");
    // This machine is reached directly, and so are hosts in NO_PROXY.
    let local = rollflow(&["engine", "status", "--kind", "vllm", &format!("https://localhost:{}", server.port())], &variables);
    assert!(local.status.success(), "{}", said(&local));
    let exempt = [&variables[..], &[("NO_PROXY", "models.test")]].concat();
    let direct = rollflow(&["engine", "status", "--kind", "vllm", "https://models.test"], &exempt);
    assert!(direct.status.code() == Some(1) && said(&direct).contains("cannot connect"), "{}", said(&direct));
    assert!(asked.lock().unwrap().is_empty());
}

#[test]
fn what_prints_to_a_full_disk_fails_and_says_so_and_to_a_closed_pipe_is_quiet() {
    let commands: [&[&str]; 8] = [
        &["help"],
        &["--help"],
        &["--version"],
        &["run", "--help"],
        &["schema"],
        &["models"],
        &["completions", "bash"],
        &["man"],
    ];
    for args in commands {
        let run = |stdout: Stdio| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_rollflow"));
            let output = command.args(args).stdout(stdout).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
            (output.status.code(), String::from_utf8(output.stderr).unwrap())
        };
        let (code, error) = run(File::options().write(true).open("/dev/full").unwrap().into());
        assert!(code == Some(1) && error.contains("standard output"), "{args:?}: {code:?} {error}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(run(writer.into()), (Some(0), String::new()), "{args:?}");
    }
    assert!(offline(&["--version"]).out.contains("rollflow"));
}
