//! Mixtures of experts on a GPU or its stand-in, against libtorch's operations in f64.

use super::super::tests::{bound, close, device, host, normal, same};
use super::*;

/// Also where groups are empty, at both ends, too.
#[test]
fn products_by_groups_equal_f64_with_their_gradients() {
    let Some(device) = device() else { return };
    tch::manual_seed(4);
    for (groups, n, k, lens) in [(4, 24, 16, vec![3, 0, 9, 5]), (3, 64, 128, vec![0, 70, 0]), (2, 8, 8, vec![1, 1])] {
        let ends: Vec<i32> = lens
            .iter()
            .scan(0, |end, len| {
                Some({
                    *end += len;
                    *end
                })
            })
            .collect();
        let rows = i64::from(ends[groups - 1]);
        let leaves = [normal(&[rows, k], Kind::BFloat16, device), normal(&[groups as i64, n, k], Kind::BFloat16, device)];
        assert!(multiplies_groups(&leaves[1]));
        let on_device = Tensor::from_slice(&ends).to_device(device);
        let exact = |x: &[Tensor]| {
            let sizes: Vec<i64> = lens.iter().map(|len| i64::from(*len)).collect();
            let parts = x[0].split_with_sizes(&sizes, 0);
            let products: Vec<Tensor> =
                parts.iter().enumerate().map(|(at, part)| part.matmul(&x[1].get(at as i64).tr())).collect();
            vec![Tensor::cat(&products, 0)]
        };
        same("products by groups", &leaves, |x| vec![multiply_groups(&x[0], &x[1], &on_device)], exact);
    }
    for other in [normal(&[2, 8, 12], Kind::BFloat16, device), normal(&[2, 8, 8], Kind::Half, device)] {
        assert!(!multiplies_groups(&other));
    }
}

#[test]
fn rows_are_sent_and_combined_as_in_f64_with_their_gradients() {
    let Some(device) = device() else { return };
    tch::manual_seed(5);
    for kind in [Kind::BFloat16, Kind::Half] {
        for (tokens, each, width) in [(5, 3, 64), (1, 1, 8), (7, 10, 272)] {
            let order = Tensor::randperm(tokens * each, (Kind::Int64, Device::Cpu));
            let (sources, places) = (order.floor_divide_scalar(each), order.argsort(0, false).view([tokens, each]));
            let (on_sources, on_places) = (sources.to_device(device), places.to_device(device));
            let leaves = [normal(&[tokens, width], kind, device)];
            let exact = |x: &[Tensor]| vec![x[0].index_select(0, &sources)];
            same("send", &leaves, |x| vec![send(&x[0], &on_sources, &on_places).unwrap()], exact);
            let leaves = [normal(&[tokens * each, width], kind, device), normal(&[tokens, each], kind, device)];
            let exact = |x: &[Tensor]| {
                let rows = x[0].index_select(0, &places.view([-1])).view([tokens, each, width]);
                vec![(rows * x[1].unsqueeze(-1)).sum_dim_intlist([1i64].as_slice(), false, Kind::Double)]
            };
            let ours = |x: &[Tensor]| vec![combine(&x[0], &on_places, &x[1].to_kind(Kind::Float)).unwrap()];
            same("combine", &leaves, ours, exact);
        }
    }
}

#[test]
fn logits_of_routers_equal_f64_with_their_gradients() {
    let Some(device) = device() else { return };
    tch::manual_seed(7);
    for (at, (tokens, experts, width)) in [(5, 8, 64), (17, 130, 40), (1, 512, 96), (33, 5, 136)].into_iter().enumerate() {
        let kind = if at % 2 == 0 { Kind::BFloat16 } else { Kind::Half };
        let leaves = [vec![tokens, width], vec![experts, width], vec![experts]].map(|shape| normal(&shape, kind, device));
        let ours = |x: &[Tensor]| vec![router(&x[0], &x[1], x.get(2)).unwrap()];
        same("router", &leaves, ours, |x| vec![x[0].linear(&x[1], Some(&x[2]))]);
        same("router without a bias", &leaves[..2], ours, |x| vec![x[0].linear::<Tensor>(&x[1], None)]);
        let exact = host(&leaves[0]).linear(&host(&leaves[1]), Some(&host(&leaves[2])));
        close("logits, unrounded", &router(&leaves[0], &leaves[1], Some(&leaves[2])).unwrap(), &exact, 1e-5);
    }
}

/// The likeliest first, with probabilities among all or among the chosen.
#[test]
fn the_likeliest_experts_are_those_of_f64() {
    let Some(device) = device() else { return };
    tch::manual_seed(7);
    for (tokens, experts, each, normalized) in [(5, 8, 2, true), (17, 130, 8, false), (1, 512, 10, true), (33, 5, 5, false)] {
        let logits = normal(&[tokens, experts], Kind::Float, device) * 3.0;
        let [weights, chosen] = likeliest(&logits, each, normalized).unwrap();
        let (expected, order) = host(&logits).softmax(-1, Kind::Double).topk(each as i64, -1, true, true);
        assert!(chosen.to_device(Device::Cpu).equal(&order), "{tokens} tokens, {experts} experts");
        let sum = expected.sum_dim_intlist([-1i64].as_slice(), true, None);
        close("weights", &weights, &if normalized { expected / sum } else { expected }, 1e-5);
    }
    // A row without numbers has some experts, which exist.
    let logits = normal(&[2, 6], Kind::Float, device);
    let _nan = logits.get(1).fill_(f64::NAN);
    let [weights, chosen] = likeliest(&logits, 3, true).unwrap().map(|of| host(&of));
    assert!(chosen.min().double_value(&[]) >= 0.0 && chosen.max().double_value(&[]) < 6.0, "{chosen}");
    assert!(weights.get(0).isfinite().all().int64_value(&[]) == 1 && weights.get(1).isfinite().any().int64_value(&[]) == 0);
}

/// Rows of an expert stay in the order of their tokens; experts without tokens end where they begin.
#[test]
fn entries_are_ordered_by_expert_as_a_stable_sort_does() {
    let Some(device) = device() else { return };
    tch::manual_seed(8);
    for (tokens, each, experts) in [(1, 1, 3), (9, 2, 4), (70, 8, 64), (1300, 7, 20)] {
        let chosen = Tensor::randint(experts, [tokens, each], (Kind::Int64, Device::Cpu));
        let [sources, sorted, places, ends] = sort_by_expert(&chosen.to_device(device), experts as usize).unwrap();
        let [sources, sorted, places, ends] = [sources, sorted, places, ends].map(|of| of.to_device(Device::Cpu));
        let (expected, order) = chosen.reshape([-1]).sort_stable(true, 0, false);
        assert!(sorted.equal(&expected) && sources.equal(&order.floor_divide_scalar(each)), "{tokens} tokens");
        assert!(places.view([-1]).index_select(0, &order).equal(&Tensor::arange(tokens * each, (Kind::Int64, Device::Cpu))));
        let count = |expert: i64| expected.le(expert).sum(Kind::Int64).int64_value(&[]);
        let until: Vec<i64> = (0..experts).map(count).collect();
        assert_eq!(Vec::<i64>::try_from(ends.to_kind(Kind::Int64)).unwrap(), until);
    }
}

#[test]
fn sums_of_rows_with_biases_and_what_computes_every_token_equal_f64() {
    let Some(device) = device() else { return };
    tch::manual_seed(9);
    for (kind, tokens, each, width) in [(Kind::BFloat16, 5, 3, 64), (Kind::Half, 3, 1, 272)] {
        let order = Tensor::randperm(tokens * each, (Kind::Int64, Device::Cpu)).view([tokens, each]);
        let rows = normal(&[tokens * each, width], kind, device);
        let weights = Tensor::rand([tokens, each], (Kind::Float, Device::Cpu));
        let (biases, chosen) =
            (normal(&[4, width], kind, device), Tensor::randint(4, [tokens, each], (Kind::Int64, Device::Cpu)));
        let (shared, gates) = (normal(&[tokens, width], kind, device), normal(&[tokens, 1], kind, device));
        let plain = host(&rows).index_select(0, &order.view([-1])).view([tokens, each, width]);
        let of_experts = host(&biases).index_select(0, &chosen.view([-1])).view([tokens, each, width]);
        let sum = |of: Tensor| (of * host(&weights).unsqueeze(-1)).sum_dim_intlist([1i64].as_slice(), false, None);
        let of_all = host(&shared) * host(&gates).sigmoid();
        let chosen = chosen.to_device(device);
        for (with_biases, with_shared) in [(false, false), (true, false), (false, true), (true, true)] {
            let more =
                Added { biases: with_biases.then_some([&biases, &chosen]), shared: with_shared.then_some([&shared, &gates]) };
            let found = sum_of_rows(&rows, &order.to_device(device), &weights.to_device(device), more).unwrap();
            let expected = sum(if with_biases { &plain + &of_experts } else { plain.shallow_clone() });
            close("sum of rows", &found, &if with_shared { expected + &of_all } else { expected }, bound(kind));
        }
        let wide = normal(&[tokens * each, 2 * width], kind, device);
        let (biases, experts) = (normal(&[4, 2 * width], kind, device), chosen.view([-1]));
        let pairs = (host(&wide) + host(&biases).index_select(0, &experts.to_device(Device::Cpu))).view([-1, width, 2]);
        let (gate, up) = (pairs.select(2, 0).clamp_max(0.9), pairs.select(2, 1).clamp(-0.9, 0.9));
        let expected = (up + 1.0) * &gate * (&gate * 1.7).sigmoid();
        close("bounded", &bounded_gate(&wide, [&biases, &experts], 1.7, 0.9).unwrap(), &expected, bound(kind));
    }
}
