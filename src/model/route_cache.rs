//! Experts of the tokens in a cache, next to their keys and values.

use tch::{Device, Kind, Tensor};

use super::block::Left;
use super::{KvCache, ModelConfig, upload};
use crate::data::{RouteShape, Routes};

/// Experts of the token in each row of a cache, `[rows, sparse layers, experts per token]`.
pub(super) struct RouteCache(Tensor);

/// Experts that a pass chooses, layer by layer; `None` if they are not wanted.
pub(super) struct RouteLog(Option<Vec<Tensor>>);

impl RouteLog {
    /// Takes what a layer leaves.
    pub fn take(&mut self, left: &Left) {
        if let (Some(layers), Left::Routed(routed)) = (&mut self.0, left) {
            layers.push(routed.chosen.to_kind(Kind::Int16));
        }
    }

    /// Returns true if the last layer computes all tokens, whose experts are wanted.
    pub fn is_of_all(&self) -> bool {
        self.0.is_some()
    }
}

impl RouteCache {
    pub fn new(config: &ModelConfig, rows: usize, device: Device) -> Option<Self> {
        let RouteShape { layers, per_token } = config.route_shape()?;
        let shape = [rows, layers, per_token].map(|size| size as i64);
        Some(RouteCache(Tensor::zeros(shape, (Kind::Int16, device))))
    }

    pub fn grow(&mut self, more: i64) {
        self.0 = self.0.constant_pad_nd([0, 0, 0, 0, 0, more]);
    }

    pub fn rows(&self) -> &Tensor {
        &self.0
    }
}

impl KvCache {
    /// For a pass that writes into this cache.
    pub(super) fn route_log(&self) -> RouteLog {
        RouteLog(self.routes.is_some().then(Vec::new))
    }

    /// Writes what a pass chose: for each slot and position, that of one of its rows.
    pub(super) fn write_routes(&mut self, log: RouteLog, places: impl Iterator<Item = (usize, usize, usize)>) {
        let (Some(RouteCache(routes)), Some(layers)) = (&self.routes, log.0) else { return };
        let each = places.map(|(slot, position, row)| (self.pages.row(slot, position), row as i64));
        let (places, rows): (Vec<i64>, Vec<i64>) = each.unzip();
        let [places, rows] = [places, rows].map(|numbers| upload(&numbers, routes.device()));
        let chosen = Tensor::stack(&layers, 1).index_select(0, &rows);
        let _written = routes.shallow_clone().index_copy_(0, &places, &chosen);
    }

    /// Writes what a step chose, for each of its tokens into a row of the cache.
    pub(super) fn write_routes_of_step(&mut self, log: RouteLog, rows: &Tensor) {
        let (Some(RouteCache(routes)), Some(layers)) = (&self.routes, log.0) else { return };
        let _written = routes.shallow_clone().index_copy_(0, rows, &Tensor::stack(&layers, 1));
    }

    /// The experts of the first `len` tokens of a slot, if they are recorded. One download.
    pub(crate) fn routes_of(&self, slot: usize, len: usize) -> Option<Routes> {
        let RouteCache(all) = self.routes.as_ref()?;
        let rows: Vec<i64> = (0..len).map(|position| self.pages.row(slot, position)).collect();
        let own = all.index_select(0, &upload(&rows, all.device()));
        let [_, layers, per_token] = [0, 1, 2].map(|dim| own.size()[dim] as usize);
        let experts: Vec<i16> = Vec::try_from(own.reshape([-1])).ok()?;
        Some(Routes { layers, per_token, experts: experts.into_iter().map(|expert| expert as u16).collect() })
    }
}
