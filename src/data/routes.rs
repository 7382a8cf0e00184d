//! The experts that computed the tokens of a sequence, for trainers that follow its generator's routing (Ma
//! et al., 2025, "rollout routing replay").

use serde::{Deserialize, Serialize};

/// An expert that is not known: the trainer chooses its own.
pub const ANY_EXPERT: u16 = u16::MAX;

/// The experts that computed the first tokens of a sequence, its prompt included, as of the pass that its
/// keys and values are of. The last sampled token has none: nothing was computed from it.
///
/// Memory: 2 bytes per token, sparse layer and expert.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Routes {
    /// Sparse layers of the model.
    pub layers: usize,
    /// Experts per token in each.
    pub per_token: usize,
    /// `[tokens, layers, per_token]`, the likeliest expert of a token first; [`ANY_EXPERT`] where one is not
    /// known.
    pub experts: Vec<u16>,
}

/// Sizes of a model's [`Routes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteShape {
    /// Sparse layers.
    pub layers: usize,
    /// Experts per token in each.
    pub per_token: usize,
}

impl Routes {
    /// Numbers per token.
    pub fn width(&self) -> usize {
        self.layers * self.per_token
    }

    /// Those of the token at a position; empty if they are not known.
    pub fn at(&self, position: usize) -> &[u16] {
        let width = self.width();
        self.experts.get(position * width..(position + 1) * width).unwrap_or(&[])
    }

    /// What is wrong with them for a model of `layers` sparse layers with `count` experts each, of which
    /// `per_token` compute a token.
    pub fn problem_for(&self, layers: usize, count: usize, per_token: usize) -> Option<String> {
        if (self.layers, self.per_token) != (layers, per_token) {
            let [found, expected] = [(self.layers, self.per_token), (layers, per_token)]
                .map(|(layers, each)| format!("{layers} sparse layers with {each} experts a token"));
            return Some(format!("its routes are of {found}, the model has {expected}"));
        }
        if self.width() == 0 || !self.experts.len().is_multiple_of(self.width()) {
            return Some(format!("its routes have {} entries, which are not {} a token", self.experts.len(), self.width()));
        }
        let wrong = self.experts.iter().find(|&&expert| expert != ANY_EXPERT && usize::from(expert) >= count);
        wrong.map(|expert| format!("its routes name expert {expert} of {count}, counted from 0"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_of_another_model_are_named() {
        let routes = Routes { layers: 2, per_token: 2, experts: vec![0, 1, 3, ANY_EXPERT, 2, 1, 0, 3] };
        assert_eq!((routes.at(1), routes.at(2)), (&[2, 1, 0, 3][..], &[][..]));
        assert_eq!(routes.problem_for(2, 4, 2), None);
        let problems = [
            (routes.problem_for(3, 4, 2), "of 2 sparse layers with 2 experts a token, the model has 3 sparse layers with 2"),
            (routes.problem_for(2, 3, 2), "expert 3 of 3"),
            (Routes { experts: vec![0; 5], ..routes.clone() }.problem_for(2, 4, 2), "5 entries, which are not 4 a token"),
            (Routes::default().problem_for(0, 0, 0), "0 entries"),
        ];
        for (found, expected) in problems {
            assert!(found.as_ref().is_some_and(|found| found.contains(expected)), "{found:?}: expected {expected:?}");
        }
    }
}
