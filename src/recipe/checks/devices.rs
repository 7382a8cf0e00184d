//! Devices beside the policy's.

use super::Note;
use crate::recipe::plan::Plan;

/// Every device that generates needs an engine.
pub(super) fn devices(plan: &Plan, note: Note) {
    let (devices, engines) = (plan.generate.devices.len(), plan.generators());
    if devices > 0 && plan.engine.is_remote() {
        let message = "`generate.devices` names devices, but servers generate".to_owned();
        note("generate.devices", &["engine"], message, "leave it out: a server chooses its own");
    } else if devices > engines {
        let message = format!("`generate.devices` names {devices} devices for {engines} of `generate.workers`");
        let help = match plan.flow.max_staleness {
            0 => "a synchronous run keeps to one engine: name one device, or make flow.max_staleness 1 or more",
            _ => "set generate.workers to as many, or to a multiple",
        };
        note("generate.devices", &["generate.workers"], message, help);
    }
}
