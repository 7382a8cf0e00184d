//! What a model folder says, as JSON on one line for each text: its token ids, and the logits after its last token. Other tools are compared with
//! that (`scripts/check_export.sh`).
//!
//! ```sh
//! cargo run --example logits -- runs/mine/checkpoints/step_000100 "3+4=" "12+5="
//! ```
//!
//! Without arguments, a small random model speaks.

use rollflow::model::ModelConfig;
use rollflow::model::Packed;
use rollflow::prelude::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let policy = match args.next() {
        Some(folder) => Policy::load(folder)?,
        None => {
            let tokenizer = Tokenizer::characters("0123456789+=", 16)?;
            Policy::random(ModelConfig::small(&tokenizer, 16, 1), tokenizer, 0)?
        }
    };
    let texts: Vec<String> = args.collect();
    let texts = if texts.is_empty() { vec!["3+4=".to_owned()] } else { texts };
    let (decoder, weights) = (policy.decoder(), policy.weights());
    let views = decoder.views_of(&weights);
    for text in texts {
        let ids = policy.tokenizer().encode(&text)?;
        let hidden = decoder.hidden(&views, &Packed::new([ids.as_slice()]));
        let last = hidden.narrow(0, ids.len() as i64 - 1, 1);
        let logits = Vec::<f32>::try_from(decoder.logits(&views, &last).view([-1]))?;
        println!("{}", serde_json::json!({ "text": text, "ids": ids, "logits": logits }));
    }
    Ok(())
}
