//! Files that a host gets once: this program, and libtorch's libraries.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use super::host::Host;

/// Files in one flat folder, named by what is in them.
pub struct Bundle {
    /// Folder there, such as `libtorch-0123456789abcdef`.
    pub folder: String,
    /// Lines for `sha256sum -c`.
    manifest: String,
    /// Folder and name of each file.
    files: Vec<(PathBuf, PathBuf)>,
    bytes: u64,
}

impl Bundle {
    /// This program.
    pub fn program() -> Result<Self> {
        let path = std::env::current_exe().context("finding this program's file")?;
        Bundle::of("rollflow", &[path])
    }

    /// The libraries that this program loaded from elsewhere than the system's folders; with `gpu`, all
    /// of libtorch's CUDA half and NVIDIA's. `None` if there are none.
    pub fn libraries(gpu: bool) -> Result<Option<Self>> {
        let maps = std::fs::read_to_string("/proc/self/maps").context("reading /proc/self/maps")?;
        let mut found = loaded(&maps);
        if gpu {
            let torch = found.iter().find(|path| path.ends_with("libtorch_cpu.so")).and_then(|path| path.parent());
            let Some(torch) = torch.filter(|folder| folder.join("libtorch_cuda.so").exists()).map(Path::to_owned) else {
                bail!(
                    "this machine's libtorch has no CUDA half to copy; bring it with ROLLFLOW_CUDA=1 make libtorch, or set deploy.program to a rollflow on the host"
                );
            };
            let nvidia = found.iter().flat_map(|path| path.ancestors()).find(|path| path.ends_with("nvidia")).map(Path::to_owned);
            for root in [Some(torch), nvidia].into_iter().flatten() {
                libraries_below(&root, &mut found)?;
            }
            // By name, since one flat folder gets them.
            let by_name: BTreeMap<_, _> = found.into_iter().map(|path| (path.file_name().map(ToOwned::to_owned), path)).collect();
            found = by_name.into_values().collect();
        }
        if found.is_empty() { Ok(None) } else { Bundle::of("libtorch", &found).map(Some) }
    }

    fn of(kind: &str, paths: &[PathBuf]) -> Result<Self> {
        let (mut manifest, mut files, mut bytes) = (String::new(), Vec::new(), 0);
        for path in paths {
            let (folder, name) = path.parent().zip(path.file_name()).with_context(|| format!("{} is no file", path.display()))?;
            let text =
                name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.+-".contains(&byte)));
            let text = text.with_context(|| format!("{}: the name has other characters than a library's", path.display()))?;
            let mut file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
            let mut hash = Sha256::new();
            bytes += io::copy(&mut file, &mut hash).with_context(|| format!("reading {}", path.display()))?;
            manifest += &format!("{:x}  ./{text}\n", hash.finalize());
            files.push((folder.to_owned(), PathBuf::from(name)));
        }
        ensure!(!files.is_empty(), "no file to copy");
        let folder = format!("{kind}-{:.16x}", Sha256::digest(&manifest));
        Ok(Bundle { folder, manifest, files, bytes })
    }

    /// Name of the first file.
    pub fn first(&self) -> String {
        self.files.first().map(|(_, name)| name.display().to_string()).unwrap_or_default()
    }

    /// Copies the files to `host` unless they are there. The folder appears by one rename, after every
    /// file was verified there. Calls `say` before it copies.
    pub fn send(&self, host: &Host<'_>, say: impl Fn(&str)) -> Result<()> {
        let Bundle { folder, manifest, files, bytes } = self;
        if host.ask(&format!("if [ -d {folder} ]; then echo there; fi"), "")?.trim() == "there" {
            return Ok(());
        }
        say(&format!("{}: copying {folder} ({} MB)", host.name, bytes.div_ceil(1_000_000)));
        let script = format!(
            "set -e\nnew=$(mktemp -d -p . {folder}.XXXXXX)\ntrap 'rm -rf \"$new\"' EXIT\ntar -x -f - -C \"$new\"\n\
             (cd \"$new\" && sha256sum --quiet -c - <<'END'\n{manifest}END\n)\n\
             mv -T \"$new\" {folder} 2> /dev/null || [ -d {folder} ]\n"
        );
        host.send(files, &script)
    }
}

/// Libraries in the text of `/proc/self/maps` that no system brings.
fn loaded(maps: &str) -> Vec<PathBuf> {
    const SYSTEM: [&str; 4] = ["/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/"];
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let libraries = paths.filter(|path| path.contains(".so") && !SYSTEM.iter().any(|folder| path.starts_with(folder)));
    let all: std::collections::BTreeSet<PathBuf> = libraries.map(PathBuf::from).collect();
    all.into_iter().filter(|path| path.is_file()).collect()
}

fn libraries_below(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("listing {}", folder.display()))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            libraries_below(&path, found)?;
        } else if name.contains(".so") && !name.contains("python") {
            found.push(path);
        }
    }
    Ok(())
}
