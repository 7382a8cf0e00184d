//! torch's AdamW after clipping by global norm, step by step, on one flat buffer.

use rollflow::train::{AdamW, clip_scale, norm};
use serde_json::Value;

use crate::case::{Case, Tensor, tensor};

pub fn adamw(case: &Case) -> Result<(), String> {
    case.only("inputs", &["params", "grads_per_step", "clip_norm"])?;
    let known =
        ["lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay"];
    case.only("config", &known)?;
    let config = &case.value["config"];
    if config["decoupled_weight_decay"] == false {
        return Err("coupled weight decay is unknown".into());
    }
    // To maximize is to follow the gradient the other way.
    let sign = if config["maximize"] == true { -1.0 } else { 1.0 };
    let setting = |value: &Value, name: &str| value.as_f64().ok_or_else(|| format!("{name} is missing"));
    let adamw = AdamW {
        beta1: setting(&config["betas"][0], "beta1")?,
        beta2: setting(&config["betas"][1], "beta2")?,
        epsilon: setting(&config["eps"], "eps")?,
        weight_decay: setting(&config["weight_decay"], "weight_decay")?,
        amsgrad: config["amsgrad"] == true,
    };
    let lr = setting(&config["lr"], "lr")?;
    let max_norm = case.count("clip_norm").ok_or("clip_norm is missing")?;

    let mut params = flat(&case.value["inputs"]["params"]).data;
    let zeros = || vec![0.0; params.len()];
    let (mut mean, mut square, mut max) = (zeros(), zeros(), if adamw.amsgrad { zeros() } else { Vec::new() });
    let steps = case.value["inputs"]["grads_per_step"].as_array().ok_or("grads_per_step is missing")?;
    for (at, grads) in steps.iter().enumerate() {
        let grad: Vec<f64> = flat(grads).data.iter().map(|slope| sign * slope).collect();
        let length = norm(&grad);
        let expected = &case.value["expected"];
        case.close(&format!("grad_norms[{at}]"), &[length], &tensor(&expected["grad_norms"][at]))?;
        let moments = [&mut mean[..], &mut square, &mut max];
        adamw.update(at as u64 + 1, lr, clip_scale(length, max_norm), &mut params, &grad, moments);
        case.close(&format!("params after step {at}"), &params, &flat(&expected["params_after_each_step"][at]))?;
    }
    Ok(())
}

/// A list of tensors end to end, as the trainer holds its parameters.
fn flat(list: &Value) -> Tensor {
    let tensors: Vec<Tensor> = list.as_array().into_iter().flatten().map(tensor).collect();
    let data: Vec<f64> = tensors.iter().flat_map(|tensor| tensor.data.iter().copied()).collect();
    Tensor { dtype: tensors[0].dtype.clone(), shape: vec![data.len()], data }
}
