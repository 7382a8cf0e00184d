//! Replica devices and generator devices.

use super::Note;
use crate::recipe::model::DeviceName;
use crate::recipe::plan::Plan;

/// Every device that generates needs an engine, and a GPU is named once.
pub(super) fn devices(plan: &Plan, note: Note) {
    let all = plan.devices();
    for (at, (key, device)) in all.iter().enumerate().filter(|(_, (_, device))| matches!(device, DeviceName::Cuda(_))) {
        // A replica device must differ from the policy's device, which a generator may share.
        let of_policy = key.ends_with(".replica_devices").then_some(plan.model.device);
        let before = all[..at].iter().filter(|(other, _)| other == key).map(|(_, device)| *device);
        if before.chain(of_policy).any(|other| other == *device) {
            let message = format!("`{key}` names {:?}, which is in use there already", device.word());
            note(key, &["model.device"], message, "name each device once; generate.workers may be more than there are devices");
        }
    }
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
