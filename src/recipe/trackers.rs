//! `[observe]`: trackers that a run is logged to while it lasts.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::plan::{Observe, Plan};
use crate::settings::declare::section;
use crate::settings::setting::GIVEN;

section! {
    /// Weights & Biases. The key is the environment variable WANDB_API_KEY, or that of `wandb login`.
    pub struct Wandb {
        /// Project.
        project: String = "rollflow".to_owned(), GIVEN;
        /// User or team. Left out: the default one of the key.
        entity: Option<String> = None;
        /// If true, nothing is sent: `wandb sync` uploads the run from its folder later.
        offline: bool = false;
        /// Samples of a written step that are logged as a table; 0 logs none.
        samples: usize = 16;
        /// Interpreter that has the package `wandb`.
        python: PathBuf = "python3".into();
    }
}

section! {
    /// trackio, on this machine.
    pub struct Trackio {
        /// Project.
        project: String = "rollflow".to_owned(), GIVEN;
        /// Samples of a written step that are logged as a table; 0 logs none.
        samples: usize = 16;
        /// Interpreter that has the package `trackio`.
        python: PathBuf = "python3".into();
    }
}

section! {
    /// MLflow. A password or a token is in its own environment variables.
    pub struct Mlflow {
        /// Experiment.
        project: String = "rollflow".to_owned(), GIVEN;
        /// Address of the tracking server. Left out: MLFLOW_TRACKING_URI, or a folder.
        uri: Option<String> = None;
        /// Samples of a written step that are logged as a table; 0 logs none.
        samples: usize = 16;
        /// Interpreter that has the package `mlflow`.
        python: PathBuf = "python3".into();
    }
}

/// A tracker of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Tracker {
    /// `wandb`, `trackio` or `mlflow`: also the name of the Python package.
    pub kind: &'static str,
    /// Interpreter.
    pub python: PathBuf,
    /// Settings of `python/rollflow/track.py`.
    pub settings: Value,
}

impl Plan {
    /// The trackers of `[observe]`.
    pub fn trackers(&self) -> Vec<Tracker> {
        let Observe { wandb, trackio, mlflow, .. } = &self.observe;
        let name = &self.name;
        let wandb = wandb.iter().map(|Wandb { project, entity, offline, samples, python }| Tracker {
            kind: "wandb",
            python: python.clone(),
            settings: json!({"name": name, "project": project, "entity": entity, "offline": offline, "samples": samples}),
        });
        let trackio = trackio.iter().map(|Trackio { project, samples, python }| Tracker {
            kind: "trackio",
            python: python.clone(),
            settings: json!({"name": name, "project": project, "samples": samples}),
        });
        let mlflow = mlflow.iter().map(|Mlflow { project, uri, samples, python }| Tracker {
            kind: "mlflow",
            python: python.clone(),
            settings: json!({"name": name, "project": project, "uri": uri, "samples": samples}),
        });
        wandb.chain(trackio).chain(mlflow).collect()
    }
}
