//! Losses that a server has built in: one pass instead of two.

use std::collections::BTreeMap;

use rollflow_tinker::TinkerError;
use rollflow_tinker::message::{AdamParams, Datum, Tensor};

use super::model::{CROSS_ENTROPY, Loss as PassLoss, RemoteModel};
use crate::algo::{BuiltIn, Cispo, Dapo, Grpo, Loss, LossInputs, OffPolicy, PolicyLoss, Proximal};
use crate::train::{Algorithm, TrainSequence};

/// Largest norm of what should cancel, relative to one of its parts.
const CANCELS: f64 = 1e-3;

/// The server's form of an algorithm, if it is one of `offered`.
pub(super) fn form(algorithm: &Algorithm, offered: &[String]) -> Option<PassLoss> {
    let OffPolicy { proximal, weigh, reject } = &algorithm.off_policy;
    let plain = *proximal == Proximal::Behaviour && weigh.is_none() && reject.is_empty();
    let form = pass_loss(algorithm.loss.built_in().filter(|_| plain)?);
    offered.contains(&form.name).then_some(form)
}

fn pass_loss(BuiltIn { name, low, high }: BuiltIn) -> PassLoss {
    let config = BTreeMap::from([("clip_low_threshold".to_owned(), low), ("clip_high_threshold".to_owned(), high)]);
    PassLoss { name: name.to_owned(), config }
}

/// Completes what the server reads of a sequence. Aggregation weights are factors of the advantages.
/// `None` if a token has no policy that sampled it.
pub(super) fn complete(mut datum: Datum, sequence: &TrainSequence) -> Option<Datum> {
    let behaviour = sequence.behaviour.as_ref()?;
    let len = datum.loss_fn_inputs["target_tokens"].len();
    let spread = |values: &mut dyn Iterator<Item = f64>| {
        let mut all = vec![0.0_f32; len];
        sequence.rows.iter().zip(values).for_each(|(&row, value)| all[row] = value as f32);
        Tensor::Floats(all)
    };
    let advantages = &mut sequence.advantages.iter().zip(&sequence.weights).map(|(advantage, weight)| advantage * weight);
    datum.loss_fn_inputs.remove("weights");
    datum.loss_fn_inputs.insert("logprobs".to_owned(), spread(&mut behaviour.iter().copied()));
    datum.loss_fn_inputs.insert("advantages".to_owned(), spread(advantages));
    Some(datum)
}

/// Names of the losses whose gradient on this server is that of this library: their pass, and a pass
/// with the opposite slopes, leave nothing. A server that adds up gradients and reports norms is asked.
pub(super) async fn offered(model: &RemoteModel) -> Result<Vec<String>, TinkerError> {
    let losses: [PolicyLoss; 3] = [Grpo::default().into(), Dapo::default().into(), Cispo::default().into()];
    let mut names: Vec<String> = Vec::new();
    for loss in losses {
        let Some(form) = loss.built_in().map(pass_loss) else { continue };
        match cancels(model, &loss, &form).await {
            Ok(true) if !names.contains(&form.name) => names.push(form.name),
            Ok(true) => {}
            // One of two that fail makes the name unreliable.
            Ok(false) => names.retain(|name| *name != form.name),
            Err(TinkerError::Remote(error)) => return Err(error.into()),
            Err(error) => tracing::debug!("{}: {error}", form.name),
        }
    }
    Ok(names)
}

async fn cancels(model: &RemoteModel, loss: &PolicyLoss, form: &PassLoss) -> Result<bool, TinkerError> {
    let (inputs, targets) = (vec![1, 2, 3, 1, 2, 3], vec![2, 3, 1, 2, 3, 1]);
    let datum = |columns: Vec<(&'static str, Vec<f64>)>| {
        let columns = columns
            .into_iter()
            .map(|(name, values)| (name, Tensor::Floats(values.into_iter().map(|value| value as f32).collect())));
        let targets = [("target_tokens", Tensor::Ints(targets.clone()))];
        vec![Datum::new(inputs.clone(), targets.into_iter().chain(columns).collect::<Vec<_>>())]
    };
    let ones = || datum(vec![("weights", vec![1.0; 6])]);
    let scores: Vec<f64> = model.forward(ones()).await?[0].iter().map(|score| f64::from(*score)).collect();
    // Ratios below, within and above the bounds, with advantages of both signs, and one between the upper
    // bounds of two losses.
    let sampler: Vec<f64> = scores.iter().zip([2.5, 2.5, 0.05, -0.215, -2.0, -2.0]).map(|(score, off)| score + off).collect();
    let advantages = vec![1.0, -0.5, 0.75, 1.5, 0.5, -1.0];
    let inputs = LossInputs {
        log_probs: &scores,
        behaviour: Some(&sampler),
        advantages: &advantages,
        weights: &[1.0; 6],
        sequences: std::slice::from_ref(&(0..6)),
        batch_tokens: 6,
        entropies: &[f64::NAN; 6],
        ..LossInputs::default()
    };
    let slopes = loss
        .evaluate(&inputs)
        .map_err(|error| TinkerError::Lacks { server: model.connection.name().to_owned(), lacks: error.to_string() })?;
    let applied = |sign: f64| datum(vec![("weights", slopes.grad.iter().map(|slope| sign * slope).collect())]);
    let cross_entropy = PassLoss::named(CROSS_ENTROPY);
    let norm = async |passes: Vec<(Vec<Datum>, &PassLoss)>| -> Result<Option<f64>, TinkerError> {
        let mut requests = Vec::new();
        for (data, loss) in passes {
            requests.extend(model.submit_passes("forward_backward", data, loss, false).await?);
        }
        let outputs = model.outputs("forward_backward", &requests).await;
        // Whatever was accumulated goes.
        let update = model.submit_update(AdamParams { learning_rate: 0.0, ..AdamParams::default() }).await?;
        let norm = model.updated(&update).await;
        outputs?;
        norm
    };
    let alone = norm(vec![(applied(-1.0), &cross_entropy)]).await?;
    let columns = vec![("logprobs", sampler.clone()), ("advantages", advantages.clone())];
    let together = norm(vec![(datum(columns), form), (applied(1.0), &cross_entropy)]).await?;
    Ok(alone.zip(together).is_some_and(|(alone, together)| together <= CANCELS * alone))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loss that is another one on the server does not cancel, and is computed in two passes.
    #[cfg(all(feature = "torch", unix))]
    #[test]
    fn a_loss_of_another_gradient_is_not_taken_for_the_same() {
        use crate::data::Tokenizer;
        use crate::model::ModelConfig;
        use crate::net::Endpoint;
        use crate::serve::{ModelServer, ServeConfig, TinkerSettings, tests};
        use crate::train::Policy;
        use crate::train::tinker::{LoraConfig, Patience, TinkerService};
        use std::net::TcpListener;

        let tokenizer = Tokenizer::characters("0123456789", 16).unwrap();
        let policy = Policy::random(ModelConfig::small(&tokenizer, 16, 1), tokenizer, 3).unwrap();
        let state = tempfile::tempdir().unwrap();
        let tinker = Some(TinkerSettings { state: state.path().to_owned(), max_models: 8 });
        let config = ServeConfig { tinker, ..tests::config(state.path()) };
        let server = ModelServer::start(&policy, TcpListener::bind("127.0.0.1:0").unwrap(), config).unwrap();
        let lora = LoraConfig { rank: 4, seed: Some(7), train_unembed: false, train_mlp: true, train_attn: true };
        let endpoint = Endpoint::new(format!("http://{}", server.address()));
        let service = TinkerService::open(endpoint, None, None, lora, Patience::default()).unwrap();
        let model = service.tasks().block_on(service.create_model(lora)).unwrap();
        let found = |loss: PolicyLoss, form: PassLoss| service.tasks().block_on(cancels(&model, &loss, &form)).unwrap();
        let (grpo, ppo) = (PolicyLoss::from(Grpo::default()), pass_loss(Grpo::default().built_in().unwrap()));
        assert!(found(grpo.clone(), ppo.clone()));
        assert!(!found(Dapo::default().into(), ppo), "the upper bound is another");
        assert!(!found(grpo, PassLoss::named("importance_sampling")), "nothing is bounded");
    }

    #[test]
    fn only_plain_losses_have_a_form() {
        let offered = ["ppo".to_owned(), "cispo".to_owned()];
        let of = |loss: PolicyLoss, off_policy: OffPolicy| {
            form(&Algorithm { off_policy, ..Algorithm::new(loss) }, &offered)
                .map(|form| (form.name, form.config.into_values().collect()))
        };
        let dapo = of(Dapo::default().into(), OffPolicy::default());
        assert_eq!(dapo, Some(("ppo".to_owned(), vec![1.28, 0.8])));
        assert_eq!(of(Cispo::default().into(), OffPolicy::default()), Some(("cispo".to_owned(), vec![5.0, 0.0])));
        let recompute = OffPolicy { proximal: Proximal::Recompute, ..OffPolicy::default() };
        assert_eq!(of(Dapo::default().into(), recompute), None);
        let others: [PolicyLoss; 3] = [
            Grpo { dual_clip: Some(3.0), ..Grpo::default() }.into(),
            PolicyLoss { entropy_coef: 0.1, ..Grpo::default().into() },
            crate::algo::Gspo::default().into(),
        ];
        assert!(others.into_iter().all(|loss| of(loss, OffPolicy::default()).is_none()));
    }
}
