//! Tensors of messages.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Most entries that the sparse tensors of one message have together in dense form. A few bytes of a sparse
/// tensor may stand for any number of zeros.
pub(crate) const MOST_DENSE: usize = 1 << 25;

/// A dense tensor of one or two dimensions.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// 32-bit floats.
    Floats(Vec<f32>),
    /// 64-bit integers.
    Ints(Vec<i64>),
    /// Rows of so many columns, which are at least 1, one after the other.
    Rows(usize, Box<Tensor>),
}

impl Tensor {
    /// Size of its entries in memory.
    pub fn bytes(&self) -> usize {
        match self {
            Tensor::Floats(of) => size_of_val(&of[..]),
            Tensor::Ints(of) => size_of_val(&of[..]),
            Tensor::Rows(_, of) => of.bytes(),
        }
    }

    /// A tensor with the entries of `flat` in this shape.
    ///
    /// # Errors
    /// Returns the reason if the shape has more dimensions, or another number of entries.
    pub fn shaped(flat: Tensor, shape: &[usize]) -> Result<Self, String> {
        match shape {
            [] | [_] => Ok(flat),
            [rows, columns] if *columns > 0 && Some(flat.len()) == rows.checked_mul(*columns) => {
                Ok(Tensor::Rows(*columns, Box::new(flat)))
            }
            _ => {
                Err(format!("a tensor of the shape {shape:?} with {} entries; one and two dimensions are understood", flat.len()))
            }
        }
    }

    /// The dense tensor of two dimensions whose other entries are 0: `flat` has the listed values row by
    /// row, `rows` where each row begins and ends among them, and `columns` the column of each. `room` is how
    /// many entries such tensors of one message may still have; this one takes its own of it.
    ///
    /// # Errors
    /// Returns the reason if the numbers do not belong together, or there is no room for the tensor.
    pub fn sparse(flat: Tensor, shape: &[usize], rows: &[i64], columns: &[i64], room: &mut usize) -> Result<Self, String> {
        let wrong = || format!("a sparse tensor of the shape {shape:?} whose indices do not fit it");
        let [height, width] = *shape else { return Err(wrong()) };
        let entries = height.checked_mul(width).ok_or_else(wrong)?;
        *room = room.checked_sub(entries).ok_or_else(|| {
            format!(
                "with one of the shape {shape:?}, the sparse tensors of this message have more than {MOST_DENSE} entries \
                 in dense form; send fewer sequences at a time"
            )
        })?;
        if rows.len().checked_sub(1) != Some(height)
            || rows[0] != 0
            || rows[height] != flat.len() as i64
            || columns.len() != flat.len()
        {
            return Err(wrong());
        }
        let mut places = Vec::with_capacity(flat.len());
        for (row, ends) in rows.windows(2).enumerate() {
            let listed = usize::try_from(ends[0]).ok().zip(usize::try_from(ends[1]).ok());
            for column in listed.and_then(|(from, to)| columns.get(from..to)).ok_or_else(wrong)? {
                let column = usize::try_from(*column).ok().filter(|column| *column < width).ok_or_else(wrong)?;
                places.push(row * width + column);
            }
        }
        fn spread<T: Copy + Default>(values: &[T], places: &[usize], entries: usize) -> Vec<T> {
            let mut dense = vec![T::default(); entries];
            places.iter().zip(values).for_each(|(place, value)| dense[*place] = *value);
            dense
        }
        let dense = match &flat {
            Tensor::Floats(values) => Tensor::Floats(spread(values, &places, entries)),
            Tensor::Ints(values) => Tensor::Ints(spread(values, &places, entries)),
            Tensor::Rows(..) => return Err(wrong()),
        };
        Tensor::shaped(dense, shape)
    }

    /// Its shape: rows, and columns of two dimensions.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Tensor::Rows(columns, _) => vec![self.len(), *columns],
            _ => vec![self.len()],
        }
    }

    /// Entries per row: 1 of one dimension.
    pub fn columns(&self) -> usize {
        if let Tensor::Rows(columns, _) = self { *columns } else { 1 }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        match self {
            Tensor::Floats(values) => values.len(),
            Tensor::Ints(values) => values.len(),
            Tensor::Rows(columns, of) => of.len() / columns,
        }
    }

    /// Returns true without entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entries as floats, row by row.
    pub fn floats(&self) -> Vec<f32> {
        match self {
            Tensor::Rows(_, of) => of.floats(),
            Tensor::Floats(values) => values.clone(),
            Tensor::Ints(values) => values.iter().map(|value| *value as f32).collect(),
        }
    }

    /// The entries as integers, row by row; `None` if one is a fraction.
    pub fn ints(&self) -> Option<Vec<i64>> {
        match self {
            Tensor::Rows(_, of) => of.ints(),
            Tensor::Ints(values) => Some(values.clone()),
            Tensor::Floats(values) => values.iter().map(|value| (value.fract() == 0.0).then_some(*value as i64)).collect(),
        }
    }
}

/// A tensor as JSON writes it. `dtype` decides, because `[1, 2]` may be floats.
#[derive(Deserialize)]
pub(crate) struct JsonTensor {
    data: Vec<f64>,
    #[serde(default)]
    dtype: Option<String>,
    #[serde(default)]
    shape: Option<Vec<usize>>,
    #[serde(default)]
    sparse_crow_indices: Option<Vec<i64>>,
    #[serde(default)]
    sparse_col_indices: Option<Vec<i64>>,
}

impl Serialize for Tensor {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Written<'a, T> {
            data: &'a [T],
            dtype: &'static str,
            shape: Vec<usize>,
        }
        let shape = self.shape();
        let mut flat = self;
        while let Tensor::Rows(_, of) = flat {
            flat = of;
        }
        match flat {
            Tensor::Floats(data) => Written { data, dtype: "float32", shape }.serialize(serializer),
            Tensor::Ints(data) => Written { data, dtype: "int64", shape }.serialize(serializer),
            Tensor::Rows(..) => unreachable!("its entries are flat"),
        }
    }
}

impl JsonTensor {
    /// The tensor, a sparse one in dense form: [`Tensor::sparse`] has `room`.
    fn dense(self, room: &mut usize) -> Result<Tensor, String> {
        let JsonTensor { data, dtype, shape, sparse_crow_indices, sparse_col_indices } = self;
        let flat = match dtype.as_deref() {
            Some("int64") => Tensor::Ints(data.into_iter().map(|value| value as i64).collect()),
            _ => Tensor::Floats(data.into_iter().map(|value| value as f32).collect()),
        };
        let shape = shape.unwrap_or_default();
        match sparse_crow_indices {
            None => Tensor::shaped(flat, &shape),
            Some(rows) => Tensor::sparse(flat, &shape, &rows, &sparse_col_indices.unwrap_or_default(), room),
        }
    }
}

/// Tensors by name, sparse ones in dense form: [`Tensor::sparse`] has `room`.
pub(crate) fn dense(tensors: BTreeMap<String, JsonTensor>, room: &mut usize) -> Result<BTreeMap<String, Tensor>, String> {
    let dense = |(name, tensor): (String, JsonTensor)| match tensor.dense(room) {
        Ok(tensor) => Ok((name, tensor)),
        Err(why) => Err(format!("`{name}`: {why}")),
    };
    tensors.into_iter().map(dense).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_and_shape_of_a_tensor_are_what_it_says() {
        let read = |text: &str| serde_json::from_str::<JsonTensor>(text).unwrap().dense(&mut 0);
        assert_eq!(read(r#"{"data": [1, 2], "dtype": "int64", "shape": [2]}"#).unwrap(), Tensor::Ints(vec![1, 2]));
        assert_eq!(read(r#"{"data": [1, 2], "dtype": "float32"}"#).unwrap(), Tensor::Floats(vec![1.0, 2.0]));
        assert_eq!(read(r#"{"data": [1.5]}"#).unwrap(), Tensor::Floats(vec![1.5]));
        let table = read(r#"{"data": [1.0, 2.0], "dtype": "float32", "shape": [1, 2]}"#).unwrap();
        assert_eq!((table.len(), table.columns(), table.shape()), (1, 2, vec![1, 2]));
        assert_eq!(serde_json::to_string(&table).unwrap(), r#"{"data":[1.0,2.0],"dtype":"float32","shape":[1,2]}"#);
        for shape in ["[1, 1, 1]", "[2, 1]", "[1, 0]"] {
            let error = read(&format!(r#"{{"data": [1.0], "shape": {shape}}}"#)).unwrap_err();
            assert!(error.contains("one and two dimensions are understood"), "{error}");
        }
        let written = serde_json::to_string(&Tensor::Floats(vec![1.0])).unwrap();
        assert_eq!(written, r#"{"data":[1.0],"dtype":"float32","shape":[1]}"#);
    }

    #[test]
    fn a_sparse_tensor_is_made_dense_and_wrong_indices_are_refused() {
        let values = || Tensor::Floats(vec![1.0, 2.0, 3.0]);
        let sparse = |shape: &[usize], rows: &[i64], columns: &[i64]| Tensor::sparse(values(), shape, rows, columns, &mut 6);
        let dense = sparse(&[3, 2], &[0, 1, 1, 3], &[1, 0, 1]).unwrap();
        assert_eq!(dense, Tensor::Rows(2, Box::new(Tensor::Floats(vec![0.0, 1.0, 0.0, 0.0, 2.0, 3.0]))));
        let cases: [(&[usize], &[i64], &[i64]); 6] = [
            (&[3], &[0, 1, 1, 3], &[1, 0, 1]),
            (&[3, 2], &[0, 1, 3], &[1, 0, 1]),
            (&[3, 2], &[0, 1, 1, 3], &[1, 0, 2]),
            (&[3, 2], &[0, 4, 1, 3], &[1, 0, 1]),
            (&[usize::MAX, 2], &[0, 1, 1, 3], &[1, 0, 1]),
            (&[usize::MAX, 0], &[], &[]),
        ];
        for (shape, rows, columns) in cases {
            assert!(sparse(shape, rows, columns).unwrap_err().contains("do not fit"), "{shape:?}");
        }
        let json =
            r#"{"data": [5.0], "dtype": "int64", "shape": [1, 2], "sparse_crow_indices": [0, 1], "sparse_col_indices": [1]}"#;
        let read = serde_json::from_str::<JsonTensor>(json).unwrap().dense(&mut 2);
        assert_eq!(read, Ok(Tensor::Rows(2, Box::new(Tensor::Ints(vec![0, 5])))));
    }
}
