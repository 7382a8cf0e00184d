//! Keys that the rest of the recipe leaves without effect: setting one to another value than its default is an error.

use super::Note;
use crate::recipe::engine::Launch;
use crate::recipe::plan::{Pipeline, Plan};
use crate::recipe::section::{Section, join};

/// Which keys of a section have no effect, and why.
struct Unused {
    section: &'static str,
    /// Keys with another value than their default.
    changed: Vec<String>,
    /// None: all keys of the section.
    only: Option<&'static [&'static str]>,
    /// Keys that have an effect after all.
    but: &'static [&'static str],
    /// The key that this follows from.
    from: &'static str,
    why: &'static str,
}

/// What local engines do with their slots, threads and caches.
const OF_ENGINES: &[&str] = &["slots", "on_new_weights", "mask_older", "workers", "threads", "devices"];
const OF_LAUNCHED: &[&str] = &["replicas", "port", "program", "flags", "env", "start_timeout", "restarts"];

pub(super) fn unused(plan: &Plan, note: Note) {
    let (generate, engine, batch) = (&plan.generate, &plan.engine, &plan.batch);
    let mut all = Vec::new();
    let mut unused = |section, changed, only, but, from, why| all.push(Unused { section, changed, only, but, from, why });
    if plan.pipeline.reinforces() {
        if engine.is_remote() {
            let why =
                "servers generate, which have their own threads, and engine.pause says what becomes of completions in flight";
            unused("generate", changed(generate), Some(&["on_new_weights", "threads"]), &[], "engine.kind", why);
            if engine.launch == Launch::None {
                unused("engine", changed(engine), Some(OF_LAUNCHED), &[], "engine.launch", "no server is launched");
            }
        } else {
            unused("engine", changed(engine), None, &["kind", "launch", "urls"], "engine.kind", "the engine is local");
        }
    } else {
        unused("generate", changed(generate), Some(OF_ENGINES), &[], "pipeline", "this pipeline generates for evaluations only");
    }
    if plan.pipeline == Pipeline::GrpoOffline {
        unused("batch", changed(batch), Some(&["over_sample"]), &[], "pipeline", "recorded groups are there from the start");
    }
    for Unused { section, changed, only, but, from, why } in all {
        let without_effect = |key: &&String| only.is_none_or(|only| only.contains(&key.as_str())) && !but.contains(&key.as_str());
        for key in changed.iter().filter(without_effect) {
            let key = join(section, key);
            note(&key, &[from], format!("`{key}` has no effect: {why}"), "leave it out");
        }
    }
}

/// The keys of a section whose values differ from their defaults.
fn changed<S: Section>(section: &S) -> Vec<String> {
    let (mut now, mut default) = (Vec::new(), Vec::new());
    section.rows(&mut now);
    S::default().rows(&mut default);
    let differs = |((key, now), (_, default)): ((String, _), (String, _))| (now != default).then_some(key);
    now.into_iter().zip(default).filter_map(differs).collect()
}

#[cfg(test)]
mod tests {
    use crate::recipe::parse;

    fn errors(pipeline: &str, sets: &[&str]) -> Vec<String> {
        let task = if pipeline == "grpo_offline" { "kind = 'rollouts', path = 'a.jsonl'" } else { "kind = 'arithmetic'" };
        let text = format!("pipeline = '{pipeline}'\nmodel.kind = 'tiny'\ntask = {{ {task} }}\n");
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        parse("r.toml", &text, &sets)
            .err()
            .into_iter()
            .flat_map(|errors| errors.iter().map(|error| error.key.clone()).collect::<Vec<_>>())
            .collect()
    }

    #[test]
    fn a_setting_that_nothing_reads_is_an_error_that_names_it() {
        let servers = "engine={kind=\"vllm\",urls=[\"http://127.0.0.1:1\"]}";
        assert_eq!(errors("grpo", &[servers]), [""; 0]);
        assert_eq!(errors("grpo", &[servers, "generate.on_new_weights=abort"]), ["generate.on_new_weights"]);
        assert_eq!(errors("grpo", &[servers, "generate.threads=2"]), ["generate.threads"]);
        let servers = "engine={kind=\"vllm\",urls=[\"http://127.0.0.1:1\"],replicas=2}";
        assert_eq!(errors("grpo", &[servers]), ["engine.replicas"]);
        assert_eq!(errors("grpo", &["generate.on_new_weights=abort", "generate.threads=2"]), [""; 0]);
        assert_eq!(errors("grpo", &["engine.pause=abort"]), ["engine.pause"]);
        assert_eq!(errors("grpo_offline", &["batch.over_sample=1.5"]), ["batch.over_sample"]);
        assert_eq!(errors("grpo_offline", &["generate.workers=2"]), ["generate.workers"]);
        assert_eq!(errors("grpo_offline", &["batch.groups=3"]), [""; 0]);
    }
}
