//! Names of files in model folders, and the kind of folder that they make.

use std::path::Path;

/// The settings of adapters.
pub(super) const ADAPTER_CONFIG: &str = "adapter_config.json";
/// The file of a model that has one.
pub(super) const WHOLE: &str = "model.safetensors";
/// The file that maps tensors to the files of a model that has several.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Returns true if `dir` holds adapters and no weights of a model. The `config.json` of the base may be
/// there, too.
pub fn holds_adapter(dir: &Path) -> bool {
    dir.join(ADAPTER_CONFIG).is_file() && ![WHOLE, INDEX].iter().any(|name| dir.join(name).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_with_the_configuration_of_their_base_are_adapters_and_those_with_its_weights_a_model() {
        for (files, expected) in [
            (&[ADAPTER_CONFIG][..], true),
            (&[ADAPTER_CONFIG, "config.json"], true),
            (&[ADAPTER_CONFIG, "config.json", WHOLE], false),
            (&[ADAPTER_CONFIG, "config.json", INDEX], false),
            (&["config.json"], false),
        ] {
            let folder = tempfile::tempdir().unwrap();
            files.iter().for_each(|name| std::fs::write(folder.path().join(name), "{}").unwrap());
            assert_eq!(holds_adapter(folder.path()), expected, "{files:?}");
        }
    }
}
