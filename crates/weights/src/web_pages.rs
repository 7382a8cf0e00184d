//! Names of the files in a folder of a web server, from the page of links that it makes of a folder, as
//! nginx (`autoindex`), Apache and Python's `http.server` do.

use std::sync::Arc;
use std::time::Duration;

use reqwest::{Client, StatusCode};

/// Longest time of a page.
const LIMIT: Duration = Duration::from_secs(60);

/// Most bytes of a page.
const LONGEST: usize = 64 << 20;

#[derive(Clone, Debug)]
pub(super) struct WebPages {
    client: Client,
    address: Arc<str>,
}

impl WebPages {
    pub fn new(client: Client, address: &str) -> Self {
        WebPages { client, address: address.trim_end_matches('/').into() }
    }

    /// Names of the files in `folder`; none if there is no such folder. An error is the reason.
    pub async fn names(&self, folder: &str) -> Result<Vec<String>, String> {
        let url = format!("{}/{folder}/", self.address);
        let read = async {
            let mut page = self.client.get(url).send().await.map_err(|error| error.without_url().to_string())?;
            match page.status() {
                StatusCode::OK => {}
                StatusCode::NOT_FOUND => return Ok(Vec::new()),
                status => return Err(format!("status {status}: the web server must list its folders")),
            }
            let mut text = Vec::new();
            while let Some(piece) = page.chunk().await.map_err(|error| error.without_url().to_string())? {
                if text.len() + piece.len() > LONGEST {
                    return Err(format!("its page has more than {LONGEST} bytes"));
                }
                text.extend_from_slice(&piece);
            }
            Ok(linked(&String::from_utf8_lossy(&text)))
        };
        let late = |_| Err(format!("timeout after {} s", LIMIT.as_secs()));
        tokio::time::timeout(LIMIT, read).await.unwrap_or_else(late)
    }
}

/// Plain file names that a page links to.
fn linked(page: &str) -> Vec<String> {
    let plain =
        |name: &&str| !name.starts_with('.') && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    let links = page.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next());
    links.filter(|name| !name.is_empty()).filter(plain).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::linked;

    #[test]
    fn a_page_names_its_files_and_neither_folders_nor_other_pages() {
        let page = r#"<a href="../">../</a><a href="w1-v2.jsonl">w1-v2.jsonl</a> <a href="data/">data/</a>
            <a href="?C=N">Name</a><a href="http://elsewhere/x">x</a><a href=".hidden">h</a><a href="">e</a>"#;
        assert_eq!(linked(page), ["w1-v2.jsonl"]);
    }
}
