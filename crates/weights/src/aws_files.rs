//! The files of the AWS command line: `~/.aws/credentials` and `~/.aws/config`, by profile.
//!
//! `object_store` reads the environment and the machine's role. Where the environment names no key
//! and no role, these files are used, as AWS's own tools do.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as Key};
use rollflow_util::reading;

/// Adds the files' credentials and region where the environment has none.
pub(crate) fn complete(mut builder: AmazonS3Builder) -> Result<AmazonS3Builder, String> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let profile = variable("AWS_PROFILE").unwrap_or_else(|| "default".to_owned());
    let home = variable("HOME").map(|home| PathBuf::from(home).join(".aws"));
    let file = |variable_name: &str, name: &str| variable(variable_name).map(PathBuf::from).or(Some(home.as_ref()?.join(name)));
    let set = |builder: &AmazonS3Builder, key: &Key| builder.get_config_value(key).is_some_and(|value| !value.is_empty());
    let named =
        [Key::AccessKeyId, Key::WebIdentityTokenFile, Key::ContainerCredentialsRelativeUri, Key::ContainerCredentialsFullUri];
    if !named.iter().any(|key| set(&builder, key))
        && let Some(path) = file("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    {
        let text = read(&path)?;
        let keys = [
            ("aws_access_key_id", Key::AccessKeyId),
            ("aws_secret_access_key", Key::SecretAccessKey),
            ("aws_session_token", Key::Token),
        ];
        for (name, key) in keys {
            if let Some(value) = value(&text, &[&profile], name) {
                builder = builder.with_config(key, value);
            }
        }
    }
    if !set(&builder, &Key::Region)
        && !set(&builder, &Key::DefaultRegion)
        && let Some(path) = file("AWS_CONFIG_FILE", "config")
        && let Some(region) = value(&read(&path)?, &[&format!("profile {profile}"), &profile], "region")
    {
        builder = builder.with_config(Key::Region, region);
    }
    Ok(builder)
}

fn read(path: &Path) -> Result<String, String> {
    match reading::read_text(path) {
        Ok(text) => Ok(text),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// The value of `name` in one of the sections.
fn value(text: &str, sections: &[&str], name: &str) -> Option<String> {
    let mut inside = false;
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            inside = sections.contains(&section.trim());
        } else if let Some((key, value)) = line.split_once('=').filter(|(key, _)| inside && key.trim() == name) {
            debug_assert!(!key.starts_with('#'));
            return Some(value.trim().to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::value;

    #[test]
    fn the_profile_decides_which_section_is_read() {
        let text = "# mine\n[default]\naws_access_key_id = one\n; no\n[profile lab]\nregion=eu-1\n[lab]\naws_access_key_id=two\n";
        let found = |section: &str, name: &str| value(text, &[&format!("profile {section}"), section], name);
        assert_eq!(found("default", "aws_access_key_id").as_deref(), Some("one"));
        assert_eq!(found("lab", "aws_access_key_id").as_deref(), Some("two"));
        assert_eq!((found("lab", "region").as_deref(), found("other", "region")), (Some("eu-1"), None));
    }
}
