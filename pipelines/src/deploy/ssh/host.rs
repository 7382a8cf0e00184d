//! A host that the system's ssh reaches, with the user's own configuration and keys.
//!
//! Scripts run in the host's POSIX shell. ssh never asks for a password, gives up connecting after 20 s
//! and ends a connection that is silent for a minute.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rollflow::util::untrusted;

use super::super::job::shell;
use super::super::settings::Ssh;

/// Options of every connection.
const OPTIONS: [&str; 4] = ["BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15", "ServerAliveCountMax=4"];

/// A host, by the name that ssh knows.
pub struct Host<'a> {
    /// Name.
    pub name: &'a str,
    settings: &'a Ssh,
}

impl<'a> Host<'a> {
    /// A host of this name.
    ///
    /// # Errors
    /// If ssh would read the name as something else.
    pub fn of(name: &'a str, settings: &'a Ssh) -> Result<Self> {
        let plain = !name.is_empty() && !name.starts_with('-') && !name.chars().any(|c| c.is_whitespace() || c.is_control());
        ensure!(plain, "{name:?} is not the name of a host; write it as ssh does, such as me@gpu1");
        Ok(Host { name, settings })
    }

    /// ssh that runs `script` there, in the folder of deployments. `options` come before the host.
    pub fn ssh(&self, options: &[&str], script: &str) -> Result<Command> {
        let folder = shell([self.settings.folder.as_str()])?;
        let script = format!("umask 077; mkdir -p -- \"$HOME\"/{folder}/runs && cd -- \"$HOME\"/{folder} || exit 1\n{script}");
        let mut command = Command::new("ssh");
        command.args(OPTIONS.iter().flat_map(|option| ["-o", option])).args(&self.settings.options).args(options);
        command.args(["--", self.name]).arg(format!("exec {}", shell(["sh", "-c", &script])?));
        Ok(command)
    }

    /// Runs `script` on the host, with `input` as its standard input, and returns what it printed.
    pub fn ask(&self, script: &str, input: &str) -> Result<String> {
        let mut command = self.ssh(&[], script)?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("starting ssh; is it installed?")?;
        if let Some(mut stdin) = child.stdin.take() {
            // A host that reads no more says why by its exit status.
            stdin.write_all(input.as_bytes()).ok();
        }
        let output = child.wait_with_output().context("waiting for ssh")?;
        self.succeeded(output.status, &output)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Packs files with tar here, and runs `script`, which unpacks its standard input, on the host.
    /// `files` are names with the folder that each is in.
    pub fn send(&self, files: &[(PathBuf, PathBuf)], script: &str) -> Result<()> {
        let mut pack = Command::new("tar");
        pack.args(["--dereference", "-c", "-f", "-"]);
        for (folder, name) in files {
            pack.arg("-C").arg(folder).arg(Path::new("./").join(name));
        }
        let mut pack = pack.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("starting tar; is it installed?")?;
        let packed = pack.stdout.take().context("tar has no output")?;
        let unpack = self.ssh(&[], script)?.stdin(packed).stderr(Stdio::piped()).stdout(Stdio::null()).output();
        let (packed, unpacked) = (pack.wait().context("waiting for tar")?, unpack.context("starting ssh; is it installed?")?);
        self.succeeded(unpacked.status, &unpacked)?;
        ensure!(packed.success(), "tar could not pack the files for {} ({packed})", self.name);
        Ok(())
    }

    /// Runs `script`, which packs files with tar, on the host, and unpacks them in `folder` here.
    pub fn receive(&self, script: &str, folder: &Path) -> Result<()> {
        let mut ssh = self.ssh(&[], script)?.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let ssh = ssh.as_mut().map_err(|error| anyhow::anyhow!("starting ssh: {error}; is it installed?"))?;
        let packed = ssh.stdout.take().context("ssh has no output")?;
        let mut unpack = Command::new("tar");
        unpack.args(["--no-same-owner", "--no-same-permissions", "-x", "-f", "-", "-C"]).arg(folder).stdin(packed);
        let unpacked = unpack.status().context("starting tar; is it installed?")?;
        let mut said = String::new();
        if let Some(mut error) = ssh.stderr.take() {
            std::io::Read::read_to_string(&mut error, &mut said).ok();
        }
        let status = ssh.wait().context("waiting for ssh")?;
        self.succeeded(status, &Output { status, stdout: Vec::new(), stderr: said.into_bytes() })?;
        ensure!(unpacked.success(), "tar could not unpack what {} sent ({unpacked})", self.name);
        Ok(())
    }

    /// Address that other hosts reach this one by: the name that ssh resolves it to.
    pub fn address(&self) -> Result<String> {
        let output = Command::new("ssh").args(&self.settings.options).args(["-G", "--", self.name]).output();
        let output = output.context("starting ssh; is it installed?")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let found = text.lines().find_map(|line| line.strip_prefix("hostname "));
        found.map(str::to_owned).with_context(|| format!("ssh knows no address of {}", self.name))
    }

    fn succeeded(&self, status: ExitStatus, output: &Output) -> Result<()> {
        if status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = untrusted::block(&lines[lines.len().saturating_sub(5)..].join("\n"));
        let name = untrusted::line(self.name);
        match status.code() {
            Some(255) => bail!("ssh could not reach {name}, or lost it; try `ssh {name} true`:\n{last}"),
            _ => bail!("{name} failed ({status}):\n{last}"),
        }
    }
}
