//! verl's policy losses: value and gradient.

use rollflow::algo::{
    Aggregation, BatchSize, BinaryDivergence, Cispo, ClipCov, Dppo, Dro, GeoMean, Grpo, Gspo, KlCov, Loss, LossChoice,
    LossInputs, LossOutput, PolicyLoss, Sapo,
};
use rollflow::recipe::NoKeys;
use serde_json::{Map, Value};

use crate::aggregation::{BATCH, verl_weights};
use crate::case::{Case, scalar};
use crate::packing::Packing;

const CONFIG: &[&str] = &[
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "tau_pos",
    "tau_neg",
    "global_batch_info",
    "policy_loss",
];

/// verl adds this to lengths that it divides by.
const GUARD: f64 = 1e-8;

pub fn loss(case: &Case) -> Result<(), String> {
    let columns = ["old_log_prob", "log_prob", "advantages", "response_mask", "rollout_is_weights", "global_batch_info"];
    case.only("inputs", &[&columns[..], &BATCH].concat())?;
    case.only("config", &[CONFIG, &BATCH].concat())?;
    let loss = composed(case)?;
    let packing = Packing::new(&case.needed("response_mask")?);
    let output = evaluate(case, &packing, &loss, None)?;
    if case.kind() == "clip_cov" {
        return drawn(case, &packing, &loss, &output);
    }
    compare(case, &packing, &output)?;
    let tokens = packing.kept.len() as f64 + GUARD;
    let clipped = (output.metrics.clipped_low + output.metrics.clipped_high) as f64 / tokens;
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        let actual = match (name.as_str(), case.kind()) {
            ("actor/pg_clipfrac", "vanilla" | "gspo" | "dppo_tv" | "dppo_kl" | "sapo") => clipped,
            // Counts that look at bounds without regard to the advantage or at other bounds, and the log-ratio's own mean: ours has none of them.
            ("actor/pg_clipfrac" | "actor/pg_clipfrac_lower" | "actor/ppo_kl", _) => continue,
            (name, _) => return Err(format!("metric {name} is unknown")),
        };
        case.close_single(name, actual, scalar(expected))?;
    }
    Ok(())
}

fn composed(case: &Case) -> Result<PolicyLoss, String> {
    let config = &case.value["config"];
    let number = |name: &str| config[name].as_f64();
    let clip_ratio = number("clip_ratio").ok_or("clip_ratio is missing")?;
    let epsilon = number("clip_ratio_low").unwrap_or(clip_ratio);
    let epsilon_high = number("clip_ratio_high").unwrap_or(clip_ratio);
    let of_loss = |name: &str| config["policy_loss"][name].as_f64();
    let dppo = |divergence| {
        LossChoice::Dppo(Dppo { divergence, epsilon, epsilon_high, max_ratio: number("clip_ratio_c").unwrap_or(20.0) })
    };
    let surrogate = match case.kind() {
        "vanilla" => {
            let dual_clip = Some(number("clip_ratio_c").unwrap_or(3.0));
            LossChoice::Grpo(Grpo { epsilon, epsilon_high, dual_clip, ..Grpo::default() })
        }
        "gspo" => LossChoice::Gspo(Gspo { epsilon, epsilon_high, by_token: true }),
        "sapo" => LossChoice::Sapo(Sapo {
            tau_pos: number("tau_pos").unwrap_or(1.0),
            tau_neg: number("tau_neg").unwrap_or(1.05),
            ..Sapo::default()
        }),
        "gpg" => LossChoice::Gpg(NoKeys),
        "cispo" => LossChoice::Cispo(Cispo { epsilon, epsilon_high, ..Cispo::default() }),
        "geo_mean" => LossChoice::GeoMean(GeoMean { epsilon, epsilon_high }),
        "dppo_tv" => dppo(BinaryDivergence::TotalVariation),
        "dppo_kl" => dppo(BinaryDivergence::Kl),
        "clip_cov" => LossChoice::ClipCov(ClipCov {
            epsilon,
            epsilon_high,
            share: of_loss("clip_cov_ratio").unwrap_or(0.0002),
            min: of_loss("clip_cov_lb").unwrap_or(1.0),
            max: of_loss("clip_cov_ub").unwrap_or(5.0),
        }),
        "kl_cov" => LossChoice::KlCov(KlCov {
            share: of_loss("kl_cov_ratio").unwrap_or(0.0002),
            coef: of_loss("ppo_kl_coef").unwrap_or(1.0),
        }),
        "dro" => LossChoice::Dro(Dro { beta: of_loss("dro_beta").ok_or("dro_beta is missing")? }),
        kind => return Err(format!("{kind} is unknown")),
    };
    // Some of verl's functions bound the exponent, others don't.
    let log_ratio_limits = match case.kind() {
        "gspo" => [f64::NEG_INFINITY, 10.0],
        "geo_mean" | "clip_cov" | "kl_cov" | "dro" => [f64::NEG_INFINITY, f64::INFINITY],
        _ => [-20.0, 20.0],
    };
    Ok(PolicyLoss { log_ratio_limits, ..surrogate.into() })
}

/// `factor` multiplies importance weights.
fn evaluate(case: &Case, packing: &Packing, loss: &PolicyLoss, factor: Option<&[f64]>) -> Result<LossOutput, String> {
    let log_probs = packing.pack(&case.needed("log_prob")?);
    let old = packing.pack(&case.needed("old_log_prob")?);
    let advantages = packing.pack(&case.needed("advantages")?);
    let given = case.input("rollout_is_weights").map(|weights| packing.pack(&weights));
    let importance = match (given, factor) {
        (Some(given), Some(factor)) => Some(given.iter().zip(factor).map(|(weight, factor)| weight * factor).collect()),
        (given, factor) => given.or(factor.map(<[f64]>::to_vec)),
    };
    let weights = weights(case, packing)?;
    let inputs = LossInputs {
        log_probs: &log_probs,
        behaviour: Some(&old),
        importance: importance.as_deref(),
        entropies: &vec![0.0; log_probs.len()],
        advantages: &advantages,
        weights: &weights,
        sequences: &packing.sequences,
        batch_tokens: packing.kept.len(),
        ..LossInputs::default()
    };
    loss.evaluate(&inputs).map_err(|error| error.to_string())
}

/// `geo_mean` and `sapo` have an aggregation of their own, and `geo_mean`'s counts all sequences and no other rank's.
fn weights(case: &Case, packing: &Packing) -> Result<Vec<f64>, String> {
    let config = &case.value["config"];
    let masks: Vec<Vec<f32>> = packing.sequences.iter().map(|at| vec![1.0; at.len()]).collect();
    let mode = match case.kind() {
        "geo_mean" => return Ok(Aggregation::SeqMeanTokenMean.token_weights(&masks, &BatchSize::of(&masks)).concat()),
        "sapo" => "seq-mean-token-mean",
        _ => config["loss_agg_mode"].as_str().ok_or("loss_agg_mode is missing")?,
    };
    let width = case.needed("response_mask")?.shape[1];
    Ok(verl_weights(mode, &batch_info(case)?, &masks, width)?.concat())
}

/// What verl passes on to `agg_loss`, `config.global_batch_info`, wherever the case holds it.
fn batch_info(case: &Case) -> Result<Value, String> {
    let config = &case.value["config"];
    let mut info = Map::new();
    for section in [&config["global_batch_info"], &case.value["inputs"]["global_batch_info"], config, &case.value["inputs"]] {
        for (name, value) in section.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
            if BATCH.contains(&name.as_str()) {
                info.entry(name).or_insert_with(|| value.clone());
            }
        }
    }
    let known = |section: &Value| section.as_object().into_iter().flatten().all(|(name, _)| BATCH.contains(&name.as_str()));
    match known(&config["global_batch_info"]) && known(&case.value["inputs"]["global_batch_info"]) {
        true => Ok(Value::Object(info)),
        false => Err("global_batch_info holds a key that this runner doesn't know".into()),
    }
}

fn compare(case: &Case, packing: &Packing, output: &LossOutput) -> Result<(), String> {
    case.close("loss", &[output.loss], &case.expected("loss")?)?;
    case.close("grad_log_prob", &packing.unpack(&output.grad), &case.expected("grad_log_prob")?)
}

/// verl draws tokens at random, so that its draw is not ours. What can be held: with verl's own draw, which its gradient shows, loss and gradient are
/// verl's; our draw is as large; and both are from the same tokens, those that all would come from if as many were drawn as there are.
fn drawn(case: &Case, packing: &Packing, loss: &PolicyLoss, output: &LossOutput) -> Result<(), String> {
    let LossChoice::ClipCov(of) = &loss.surrogate else { return Err("clip_cov is another surrogate".into()) };
    let clip = Grpo { epsilon: of.epsilon, epsilon_high: of.epsilon_high, ..Grpo::default() };
    let plain = PolicyLoss { surrogate: LossChoice::Grpo(clip), ..loss.clone() };
    let before = evaluate(case, packing, &plain, None)?;
    let theirs = packing.pack(&case.expected("grad_log_prob")?);
    let silenced =
        |grad: &[f64]| -> Vec<bool> { grad.iter().zip(&before.grad).map(|(own, plain)| *own == 0.0 && *plain != 0.0).collect() };
    let (ours, theirs) = (silenced(&output.grad), silenced(&theirs));
    let factors: Vec<f64> = theirs.iter().map(|out| if *out { 0.0 } else { 1.0 }).collect();
    compare(case, packing, &evaluate(case, packing, &plain, Some(&factors))?)?;

    let count = |out: &[bool]| out.iter().filter(|out| **out).count();
    if count(&ours) != count(&theirs) {
        return Err(format!("{} tokens were drawn, {} by verl", count(&ours), count(&theirs)));
    }
    let greedy = PolicyLoss { surrogate: LossChoice::ClipCov(ClipCov { share: 1.0, ..of.clone() }), ..loss.clone() };
    let eligible = silenced(&evaluate(case, packing, &greedy, None)?.grad);
    let strays = |out: &[bool]| out.iter().zip(&eligible).any(|(out, may)| *out && !may);
    if strays(&ours) || strays(&theirs) {
        return Err("a token was drawn whose covariance is out of range".into());
    }
    Ok(())
}
