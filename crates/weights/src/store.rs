//! A folder of an object store, of this machine, or of a web server, by its address.
//!
//! Calls block, and run on the process's runtime for HTTP: not for tasks. Each ends within a
//! deadline. The library `object_store` retries; TLS, proxies and timeouts are those of
//! [`rollflow_net`].

use std::fmt;
use std::future::Future;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::{ClientOptions, HttpClient, HttpConnector};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig};
use rollflow_net::{Tasks, bare_client};
use rollflow_util::secrets::masked;
use rollflow_util::{atomic_file, untrusted};

use super::web_pages::WebPages;
use super::{WeightsError, aws_files};

/// Longest pause of an answer.
const STALL: Duration = Duration::from_secs(60);

/// Longest time of one object, retries included.
const OBJECT: Duration = Duration::from_secs(900);

/// Objects that are sent or fetched at a time.
const AT_ONCE: usize = 4;

/// Longest error of a store that is shown, in characters.
const SHOWN: usize = 400;

/// A folder of a store. Clones share connections.
#[derive(Clone)]
pub struct Store {
    name: String,
    store: Arc<dyn ObjectStore>,
    folder: Path,
    /// Pages that list the folders of a web server.
    pages: Option<WebPages>,
    tasks: Arc<Tasks>,
}

/// Requests by rollflow's HTTP client.
#[derive(Debug)]
struct Connector(HttpClient);

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(self.0.clone())
    }
}

/// Checks an address without connecting: its scheme, its bucket, and that it holds no password.
///
/// # Errors
/// The problem.
pub fn check_address(address: &str) -> Result<(), String> {
    let Some((scheme, rest)) = address.split_once("://") else {
        return match FilePath::new(address).is_absolute() {
            true => Ok(()),
            false => Err("it has no scheme, and is no absolute path".to_owned()),
        };
    };
    let bucket = rest.split('/').next().unwrap_or_default();
    match scheme {
        "file" if rest.starts_with('/') => Ok(()),
        "file" => Err("the path after file:// is not absolute".to_owned()),
        "s3" | "gs" | "az" | "azure" if bucket.is_empty() => Err("it names no bucket".to_owned()),
        "http" | "https" if bucket.is_empty() => Err("it names no host".to_owned()),
        "http" | "https" if bucket.contains('@') || rest.contains(['?', '#']) => {
            Err("the address of a web server holds neither credentials nor options".to_owned())
        }
        "s3" | "gs" | "az" | "azure" if bucket.contains(['@', ':']) || rest.contains(['?', '#']) => {
            Err("an address holds neither credentials nor options; both come from the environment".to_owned())
        }
        "s3" | "gs" | "az" | "azure" | "http" | "https" => Ok(()),
        other => Err(format!("there is no kind of store {other:?}")),
    }
}

/// Checks the address of a store that is written to, as [`check_address`] does.
///
/// # Errors
/// The problem.
pub fn check_writable(address: &str) -> Result<(), String> {
    match address.split_once("://") {
        Some(("http" | "https", _)) => Err("a web server can be read, and not written".to_owned()),
        _ => check_address(address),
    }
}

impl Store {
    /// Opens `s3://bucket/folder`, `gs://…`, `az://…`, `file:///folder` or an absolute path; or, to read,
    /// the folder of a web server that lists its folders, `http://host/folder`. Connects
    /// with the first call. Credentials come from the environment, from the files that the store's own
    /// tools use, or from the machine's role; see docs/how_to/stores.md. `ca_file` is a PEM file of
    /// further authorities.
    ///
    /// # Errors
    /// [`WeightsError::Address`], and [`WeightsError::Store`] if settings in the environment contradict
    /// each other.
    pub fn open(address: &str, ca_file: Option<&FilePath>) -> Result<Self, WeightsError> {
        let shown = masked(address.trim_end_matches('/'));
        let refuse = |why: String| WeightsError::Address { address: shown.clone(), why };
        check_address(address).map_err(refuse)?;
        let failed = |why: String| WeightsError::Store { store: shown.clone(), what: "opening it".to_owned(), why };
        let (scheme, rest) = address.split_once("://").unwrap_or(("file", address));
        let (bucket, folder) = rest.split_once('/').unwrap_or((rest, ""));
        let client = || bare_client(ca_file, STALL).map_err(|fault| failed(fault.to_string()));
        let http = || Ok::<_, WeightsError>(Connector(HttpClient::new(client()?)));
        let web = matches!(scheme, "http" | "https");
        let retry = RetryConfig { max_retries: 8, retry_timeout: Duration::from_secs(120), ..RetryConfig::default() };
        let built: Result<Arc<dyn ObjectStore>, Error> = match scheme {
            "s3" => {
                let builder = aws_files::complete(AmazonS3Builder::from_env()).map_err(failed)?;
                let builder = builder.with_bucket_name(bucket).with_http_connector(http()?).with_retry(retry);
                builder.build().map(|store| Arc::new(store) as _)
            }
            "gs" => {
                let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
                builder.with_http_connector(http()?).with_retry(retry).build().map(|store| Arc::new(store) as _)
            }
            "az" | "azure" => {
                let builder = MicrosoftAzureBuilder::from_env().with_container_name(bucket);
                builder.with_http_connector(http()?).with_retry(retry).build().map(|store| Arc::new(store) as _)
            }
            "http" | "https" => {
                let builder = HttpBuilder::new().with_url(address).with_http_connector(http()?).with_retry(retry);
                // Its own check allows TLS alone.
                let builder = builder.with_client_options(ClientOptions::new().with_allow_http(true));
                builder.build().map(|store| Arc::new(store) as _)
            }
            _ => {
                atomic_file::create_folder(FilePath::new(rest)).map_err(WeightsError::io(rest))?;
                LocalFileSystem::new_with_prefix(rest)
                    .map(|store| Arc::new(store.with_fsync(true).with_automatic_cleanup(true)) as _)
            }
        };
        let store = built.map_err(|error| failed(shorten(&error)))?;
        let pages = if web { Some(WebPages::new(client()?, address)) } else { None };
        let folder = Path::from(if scheme == "file" || web { "" } else { folder });
        let tasks = Tasks::new().map_err(|error| failed(error.to_string()))?;
        Ok(Store { name: shown, store, folder, pages, tasks: Arc::new(tasks) })
    }

    /// The folder `name` in this one.
    pub fn below(&self, name: &str) -> Self {
        let folder = self.at(name);
        Store { name: format!("{}/{name}", self.name), folder, ..self.clone() }
    }

    /// The address, without secrets.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn at(&self, object: &str) -> Path {
        object.split('/').fold(self.folder.clone(), Path::join)
    }

    /// Writes an object, whatever was there.
    pub(crate) fn put(&self, object: &str, bytes: Vec<u8>) -> Result<(), WeightsError> {
        let at = self.at(object);
        self.run("writing", object, self.store.put(&at, bytes.into())).map(drop)
    }

    /// Writes an object unless there is one; false: there is another one, which stays.
    pub(crate) fn create(&self, object: &str, bytes: Vec<u8>) -> Result<bool, WeightsError> {
        let at = self.at(object);
        let write = async {
            let made = self.store.put_opts(&at, bytes.clone().into(), PutOptions::from(PutMode::Create)).await;
            match made {
                Ok(_) => Ok(true),
                // A retry of a request that arrived the first time finds its own object.
                Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {
                    Ok(self.store.get(&at).await?.bytes().await? == bytes)
                }
                Err(error) => Err(error),
            }
        };
        self.run("writing", object, write)
    }

    /// Writes several objects, some at a time.
    pub(crate) fn put_all(&self, objects: Vec<(String, Vec<u8>)>) -> Result<(), WeightsError> {
        let writes = objects.into_iter().map(|(object, bytes)| async move {
            let at = self.at(&object);
            self.limited("writing", &object, self.store.put(&at, bytes.into())).await.map(drop)
        });
        self.tasks.block_on(stream::iter(writes).buffer_unordered(AT_ONCE).try_collect())
    }

    /// Reads several objects, some at a time, and passes each to `take` on arrival. An object that is
    /// missing, or has other than its `bytes`, is an error.
    pub(crate) fn get_all(
        &self,
        objects: &[(String, u64)],
        mut take: impl FnMut(&str, Vec<u8>) -> Result<(), WeightsError>,
    ) -> Result<(), WeightsError> {
        let reads = objects.iter().map(|(object, bytes)| async move {
            let read = async {
                let found = self.store.get(&self.at(object)).await?;
                // Not read, whatever its size is.
                if found.meta.size != *bytes {
                    return Ok(Err(found.meta.size));
                }
                Ok(Ok(found.bytes().await?.to_vec()))
            };
            let found = self.limited("reading", object, read).await?;
            let wrong = |size| self.failed("reading", object, format!("it has {size} bytes, and {bytes} are expected"));
            found.map_err(wrong).map(|bytes| (object, bytes))
        });
        self.tasks.block_on(async {
            let mut reads = stream::iter(reads).buffer_unordered(AT_ONCE);
            while let Some((object, bytes)) = reads.try_next().await? {
                take(object, bytes)?;
            }
            Ok(())
        })
    }

    /// Reads an object of at most `most` bytes; none if there is none.
    pub(crate) fn get(&self, object: &str, most: usize) -> Result<Option<Vec<u8>>, WeightsError> {
        let at = self.at(object);
        let read = async {
            match self.store.get(&at).await {
                Err(Error::NotFound { .. }) => Ok(Ok(None)),
                Err(error) => Err(error),
                Ok(found) if found.meta.size > most as u64 => Ok(Err(found.meta.size)),
                Ok(found) => Ok(Ok(Some(found.bytes().await?.to_vec()))),
            }
        };
        let found = self.run("reading", object, read)?;
        found.map_err(|size| self.failed("reading", object, format!("it has {size} bytes, and at most {most} are read")))
    }

    /// Names of the objects in a folder.
    pub(crate) fn list(&self, folder: &str) -> Result<Vec<String>, WeightsError> {
        if let Some(pages) = &self.pages {
            let page = self.tasks.block_on(pages.names(self.at(folder).as_ref()));
            return page.map_err(|why| self.failed("listing", folder, why));
        }
        Ok(self.entries(folder)?.objects.into_iter().filter_map(|of| of.location.filename().map(str::to_owned)).collect())
    }

    /// Names of the folders in a folder.
    pub(crate) fn folders(&self, folder: &str) -> Result<Vec<String>, WeightsError> {
        Ok(self.entries(folder)?.common_prefixes.iter().filter_map(|of| of.filename().map(str::to_owned)).collect())
    }

    fn entries(&self, folder: &str) -> Result<object_store::ListResult, WeightsError> {
        let at = self.at(folder);
        self.run("listing", folder, self.store.list_with_delimiter(Some(&at)))
    }

    /// Deletes an object; one that does not exist is no error.
    pub(crate) fn delete(&self, object: &str) -> Result<(), WeightsError> {
        let at = self.at(object);
        let delete = async {
            match self.store.delete(&at).await {
                Err(Error::NotFound { .. }) => Ok(()),
                deleted => deleted,
            }
        };
        self.run("deleting", object, delete)
    }

    fn run<T>(&self, what: &str, object: &str, work: impl Future<Output = Result<T, Error>>) -> Result<T, WeightsError> {
        self.tasks.block_on(self.limited(what, object, work))
    }

    async fn limited<T>(
        &self,
        what: &str,
        object: &str,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, WeightsError> {
        match tokio::time::timeout(OBJECT, work).await {
            Ok(done) => done.map_err(|error| self.failed(what, object, shorten(&error))),
            Err(_) => Err(self.failed(what, object, format!("timeout after {} s", OBJECT.as_secs()))),
        }
    }

    fn failed(&self, what: &str, object: &str, why: String) -> WeightsError {
        WeightsError::Store { store: self.name.clone(), what: format!("{what} {object}"), why }
    }
}

/// An error in one line, without secrets.
fn shorten(error: &Error) -> String {
    untrusted::line(&masked(&error.to_string())).chars().take(SHOWN).collect()
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.name).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_a_kind_and_a_bucket_and_hold_no_credentials() {
        for good in ["s3://bucket", "s3://bucket/a/b", "gs://b/x", "az://c/x", "file:///tmp/x", "/tmp/x", "http://host:80/x"] {
            assert_eq!(check_address(good), Ok(()), "{good}");
        }
        for bad in [
            "",
            "bucket/x",
            "s3://",
            "s3:///x",
            "ftp://x",
            "file://x",
            "s3://key:secret@bucket/x",
            "s3://bucket/x?key=1",
            "https://",
            "http://a:b@host/x",
        ] {
            assert!(check_address(bad).is_err(), "{bad}");
        }
        let told = Store::open("s3://key:hunter2@bucket/x", None).unwrap_err().to_string();
        assert!(!told.contains("hunter2") && told.contains("credentials"), "{told}");
    }

    #[test]
    fn an_object_is_created_once_and_the_same_bytes_again_are_no_conflict() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_str().unwrap(), None).unwrap().below("a");
        assert!(store.create("m/one", b"x".to_vec()).unwrap());
        assert!(store.create("m/one", b"x".to_vec()).unwrap());
        assert!(!store.create("m/one", b"y".to_vec()).unwrap());
        assert_eq!(store.get("m/one", 9).unwrap().unwrap(), b"x");
        assert_eq!((store.get("m/two", 9).unwrap(), store.list("m").unwrap()), (None, vec!["one".to_owned()]));
        assert!(store.get("m/one", 0).unwrap_err().to_string().contains("at most 0"));
        store.delete("m/one").unwrap();
        store.delete("m/one").unwrap();
        assert_eq!(store.folders("").unwrap(), Vec::<String>::new());
    }
}
