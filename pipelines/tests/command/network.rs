//! The command and the network: TLS, proxies, the hub, and outputs that take nothing.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use axum::extract::Path as In;
use axum::http::StatusCode;
use axum::http::header::ETAG;
use axum::response::IntoResponse;
use axum::{Router, routing};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::running::rollflow as offline;

#[path = "../../../tests/support/tls.rs"]
mod tls;

use tls::{Authority, proxy, serve};

const RECIPE: &str = "pipelines/recipes/grpo_vllm.toml";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn rollflow(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rollflow"));
    for name in
        ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"]
    {
        command.env_remove(name);
    }
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).args(args).envs(variables.iter().copied()).output().unwrap()
}

fn said(output: &Output) -> String {
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

/// A hub with the golden model `of` as `org/tiny`.
fn hub(runtime: &Runtime, of: &str) -> String {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models").join(of);
    let files = fs::read_dir(golden).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    let files = files.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()));
    let files: Arc<BTreeMap<String, Vec<u8>>> = Arc::new(files.collect());
    let listed: Vec<_> = files.keys().map(|name| json!({ "rfilename": name })).collect();
    let info = json!({ "sha": COMMIT, "siblings": listed }).to_string();
    let file = move |In((_, name)): In<(String, String)>| async move {
        match files.get(&name) {
            Some(bytes) => ([(ETAG, format!("\"{:x}-{}\"", bytes.len(), name.replace('.', "_")))], bytes.clone()).into_response(),
            None => StatusCode::NOT_FOUND.into_response(),
        }
    };
    let routes = Router::new()
        .route("/api/models/org/tiny/revision/{revision}", routing::get(move || async move { info }))
        .route("/org/tiny/resolve/{commit}/{file}", routing::get(file));
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        url
    })
}

#[test]
fn a_model_that_a_recipe_names_by_its_id_is_fetched_when_it_is_first_used() {
    let (runtime, folder) = (Runtime::new().unwrap(), tempfile::tempdir().unwrap());
    let url = hub(&runtime, "qwen2_tied");
    let recipe = folder.path().join("run.toml");
    let text = "pipeline = 'grpo'\n[model]\nkind = 'folder'\npath = 'org/tiny'\n[task]\nkind = 'arithmetic'\n[generate]\nmax_new_tokens = 4\n";
    fs::write(&recipe, text).unwrap();
    let home = folder.path().join("hf");
    let check = |variables: &[(&str, &str)]| {
        let all = [&[("HF_HOME", home.to_str().unwrap()), ("HF_ENDPOINT", url.as_str())], variables].concat();
        rollflow(&["check", recipe.to_str().unwrap()], &all)
    };
    let offline = check(&[("HF_HUB_OFFLINE", "1")]);
    assert!(offline.status.code() == Some(2) && said(&offline).contains("HF_HUB_OFFLINE is set"), "{}", said(&offline));
    let fetched = check(&[]);
    assert!(fetched.status.success(), "{}", said(&fetched));
    assert!(home.join("hub/models--org--tiny/snapshots").join(COMMIT).join("model.safetensors").exists());
    let again = check(&[("HF_HUB_OFFLINE", "1")]);
    assert!(again.status.success(), "{}", said(&again));
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
