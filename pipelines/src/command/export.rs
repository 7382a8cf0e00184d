//! `rollflow export`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use rollflow::model::{Dtype, base_of, export_adapter, export_hf, holds_adapter};
use rollflow::train::checkpoint::{self, CHECKPOINTS};
use rollflow::train::companions;
use rollflow::train::tinker;
use rollflow::util::atomic_file;

use super::policies::model_folder;
use super::{choice, out, refused};

/// Export a trained model as a folder that transformers, PEFT and servers load: adapters merged,
/// cast, in shards.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow export runs/mine trained --dtype bf16 --max-shard-size 2GB\n\
\x20 rollflow export runs/mine adapters --adapter    (of a run with [lora])")]
pub struct Export {
    /// A run, whose newest complete checkpoint is taken; a checkpoint; or any model folder.
    from: PathBuf,
    /// The folder to write, which must not exist yet.
    to: PathBuf,
    /// The precision of the numbers: bf16 has the range of f32, f16 ends at 65504.
    #[arg(long, value_parser = choice(Dtype::ALL, Dtype::word), default_value = "f32")]
    dtype: Dtype,
    /// The largest file of weights, as in 2GB or 500MB; without it, there is one file.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_shard_size: Option<u64>,
    /// Write the adapters alone, as PEFT loads them, and not the model that they are merged into.
    #[arg(long, conflicts_with_all = ["dtype", "max_shard_size"])]
    adapter: bool,
    /// The model under the adapters, if it is not where they name it: a folder or a hub id.
    #[arg(long, value_name = "FOLDER")]
    base: Option<PathBuf>,
    /// Environment variable with the API key of the server that trained the run (trainer.key_env).
    #[arg(long, value_name = "NAME")]
    key_env: Option<String>,
}

/// The newest checkpoint of a run, or a checkpoint, whose weights are on a server of the Tinker API.
fn on_a_server(from: &Path) -> Result<Option<PathBuf>> {
    let newest = checkpoint::latest(&from.join(CHECKPOINTS))?;
    Ok([Some(from.to_owned()), newest].into_iter().flatten().find(|folder| folder.join(tinker::ADDRESS).is_file()))
}

/// `2GB` in bytes; units are powers of 1000, as in transformers.
fn size(text: &str) -> Result<u64, String> {
    let units = [("GB", 1e9), ("MB", 1e6), ("KB", 1e3)];
    let (number, unit) = units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit))).unwrap_or((text, 1.0));
    let bytes = number.trim().parse::<f64>().ok().map(|number| number * unit).filter(|bytes| *bytes >= 1.0 && bytes.is_finite());
    bytes.map(|bytes| bytes as u64).ok_or_else(|| format!("{text:?} is no size; write it as 2GB, 500MB or 100KB"))
}

/// Refuses to write to a path that exists.
pub fn refuse_existing(to: &Path) -> Result<()> {
    match to.exists() {
        true => Err(refused(format!("{} exists already, and nothing is overwritten; choose another name", to.display()))),
        false => Ok(()),
    }
}

impl Export {
    pub fn run(self) -> Result<()> {
        out::line(&format!("exported {}", self.write()?.display()))
    }

    /// Downloads what a server of the Tinker API trained.
    fn download(&self, checkpoint: &Path, to: &Path) -> Result<()> {
        let key = self.key_env.as_ref().map(|name| std::env::var(name).with_context(|| format!("the environment has no {name}")));
        tinker::download(checkpoint, key.transpose()?.as_deref(), None, to).context("downloading the weights")
    }

    /// A folder next to the one that is written, for a part of the work, and empty.
    fn part_folder(&self, what: &str) -> Result<PathBuf> {
        let Some(name) = self.to.file_name() else { bail!("{} names no folder", self.to.display()) };
        let folder = self.to.with_file_name(format!(".{}.{what}", name.to_string_lossy()));
        atomic_file::remove(&folder).with_context(|| format!("removing {}", folder.display()))?;
        Ok(folder)
    }

    /// Writes the folder, all of it or nothing, and gives what it was made from.
    fn write(&self) -> Result<PathBuf> {
        refuse_existing(&self.to)?;
        let Some(checkpoint) = on_a_server(&self.from)? else { return self.write_from(model_folder(&self.from)?) };
        if self.base.is_some() {
            return Err(refused("a server of the Tinker API trained this run, and has the base; leave --base out"));
        }
        match (tinker::has_adapters(&checkpoint)?, self.adapter) {
            (true, true) => self.download(&checkpoint, &self.to)?,
            (true, false) => {
                let why = "a server of the Tinker API trained this run, and has its adapters: give --adapter";
                return Err(refused(why));
            }
            (false, _) => {
                let downloaded = self.part_folder("downloading")?;
                self.download(&checkpoint, &downloaded)?;
                self.write_from(downloaded.clone())?;
                atomic_file::remove(&downloaded).with_context(|| format!("removing {}", downloaded.display()))?;
            }
        }
        Ok(checkpoint)
    }

    /// The folder of the model under the adapters in `from`, if there are any: --base, else the one they name.
    fn base_under(&self, from: &Path) -> Result<Option<PathBuf>> {
        let Some(base) = &self.base else { return Ok(base_of(from)?) };
        if !holds_adapter(from) {
            return Err(refused(format!("{} holds no adapters, but a whole model; leave --base out", from.display())));
        }
        let folder = model_folder(base)?;
        if holds_adapter(&folder) {
            return Err(refused(format!("--base: {} holds adapters; give the model under them", folder.display())));
        }
        Ok(Some(std::path::absolute(&folder).with_context(|| format!("finding {}", folder.display()))?))
    }

    fn write_from(&self, from: PathBuf) -> Result<PathBuf> {
        let (base, adapted) = (self.base_under(&from)?, holds_adapter(&from));
        ensure!(adapted || !self.adapter, "{} holds no adapters, but a whole model; leave --adapter out", from.display());
        let folder = self.part_folder("writing")?;
        let written = match self.adapter {
            true => export_adapter(&from, base.as_deref(), &folder),
            false => export_hf(&from, base.as_deref(), &folder, self.dtype, self.max_shard_size).map(|()| false),
        };
        let is_renamed = written.with_context(|| format!("exporting {}", from.display()))?;
        // Adapters without a tokenizer are used with the base's. The companions are tokenizer files and templates.
        let base = base.filter(|_| !from.join("tokenizer.json").exists());
        for origin in base.iter().chain([&from]) {
            for (name, content) in companions(origin)? {
                let path = folder.join(&name);
                let parent = path.parent().unwrap_or(&folder);
                let written = std::fs::create_dir_all(parent).and_then(|()| std::fs::write(&path, content));
                written.with_context(|| format!("writing {name}"))?;
            }
        }
        atomic_file::publish(&folder, &self.to).with_context(|| format!("writing {}", self.to.display()))?;
        if is_renamed {
            out::line(&format!(
                "tensors are named as vLLM and AutoModelForImageTextToText load the base (model.language_model.layers…); \
                 for AutoModelForCausalLM, give PEFT {}",
                from.display()
            ))?;
        }
        Ok(from)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn sizes_are_read_as_transformers_reads_them() {
        let read = super::size;
        assert_eq!(
            [read("2GB"), read("1.5MB"), read("7 KB"), read("12")].map(Result::unwrap),
            [2_000_000_000, 1_500_000, 7000, 12]
        );
        assert!(["", "GB", "-1GB", "2TBs", "0"].iter().all(|text| read(text).is_err()));
    }
}
