//! Checks of tool arguments against a part of JSON Schema: `type`, `nullable`, `anyOf`, `properties`,
//! `required`, `additionalProperties`, `items`, `enum`, `minimum` and `maximum`. Other keywords are
//! ignored.

use serde_json::{Map, Value, json};

/// Deepest nesting that is checked.
const DEPTH: usize = 32;

/// Checks arguments against a schema; the error is for the model. A text is parsed as a number,
/// boolean, list, object or null if the schema requires one. Of `anyOf` a schema that fits without
/// that counts, else the first that fits.
pub fn check_arguments(arguments: &mut Map<String, Value>, schema: &Value) -> Result<(), String> {
    let mut value = Value::Object(std::mem::take(arguments));
    let checked = check(&mut value, schema, "", DEPTH);
    if let Value::Object(fields) = value {
        *arguments = fields;
    }
    checked
}

fn check(value: &mut Value, schema: &Value, path: &str, depth: usize) -> Result<(), String> {
    let (Some(schema), Some(depth)) = (schema.as_object(), depth.checked_sub(1)) else { return Ok(()) };
    let mut types: Vec<&str> = match schema.get("type") {
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(several)) => several.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let nullable = schema.get("nullable") == Some(&Value::Bool(true));
    if nullable && !types.is_empty() {
        types.push("null");
    }
    if !types.is_empty() && !types.iter().any(|name| is(value, name)) {
        let read = value.as_str().and_then(|text| serde_json::from_str::<Value>(text.trim()).ok());
        match read.filter(|read| types.iter().any(|name| is(read, name))) {
            Some(read) => *value = read,
            None => return Err(format!("{} must be of type {}, not {}", called(path), types.join(" or "), short(value))),
        }
    }
    if nullable && value.is_null() {
        return Ok(());
    }
    if let Some(Value::Array(branches)) = schema.get("anyOf") {
        any_of(value, branches, nullable, path, depth)?;
    }
    if let Some(Value::Array(allowed)) = schema.get("enum")
        && !allowed.contains(value)
    {
        let allowed: Vec<String> = allowed.iter().map(Value::to_string).collect();
        return Err(format!("{} must be one of {}, not {}", called(path), allowed.join(", "), short(value)));
    }
    if let Some(number) = value.as_f64() {
        let bound = |key: &str| schema.get(key).and_then(Value::as_f64);
        if bound("minimum").is_some_and(|least| number < least) || bound("maximum").is_some_and(|most| number > most) {
            let (least, most) = (bound("minimum").unwrap_or(f64::NEG_INFINITY), bound("maximum").unwrap_or(f64::INFINITY));
            return Err(format!("{} must lie from {least} to {most}, and is {number}", called(path)));
        }
    }
    match value {
        Value::Object(fields) => object(fields, schema, path, depth),
        Value::Array(items) => match schema.get("items") {
            Some(schema) => {
                items.iter_mut().enumerate().try_for_each(|(at, item)| check(item, schema, &format!("{path}[{at}]"), depth))
            }
            None => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Checks a value against the schemas: one that fits without a change, else the first that converts it.
fn any_of(value: &mut Value, branches: &[Value], nullable: bool, path: &str, depth: usize) -> Result<(), String> {
    let null = json!({ "type": "null" });
    let (mut converted, mut problems) = (None, Vec::new());
    for branch in branches.iter().chain(nullable.then_some(&null)) {
        let mut read = value.clone();
        match check(&mut read, branch, path, depth) {
            Ok(()) if read == *value => return Ok(()),
            Ok(()) => drop(converted.get_or_insert(read)),
            Err(problem) => problems.push(problem),
        }
    }
    match converted {
        Some(read) => *value = read,
        None if problems.is_empty() => {}
        None => return Err(problems.join("; or ")),
    }
    Ok(())
}

fn object(fields: &mut Map<String, Value>, schema: &Map<String, Value>, path: &str, depth: usize) -> Result<(), String> {
    let join = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    let required = schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    for key in required {
        if !fields.contains_key(key) {
            return Err(format!("{} is missing", called(&join(key))));
        }
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    let closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
    for (key, value) in fields.iter_mut() {
        match properties.and_then(|all| all.get(key)) {
            Some(schema) => check(value, schema, &join(key), depth)?,
            None if closed => return Err(format!("{} is not known", called(&join(key)))),
            None => {}
        }
    }
    Ok(())
}

fn is(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        _ => true,
    }
}

fn called(path: &str) -> String {
    if path.is_empty() { "the arguments".to_owned() } else { format!("`{path}`") }
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 40 { text } else { text.chars().take(40).chain("…".chars()).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_checked_by_name_and_place() {
        let schema = json!({"type": "object", "required": ["unit"], "additionalProperties": false, "properties": {
            "unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "at": {"type": "array", "items": {"type": "object", "required": ["lat"]}}, "raw": {"type": ["string", "null"]}}});
        let checked = |given: Value| check_arguments(&mut serde_json::from_value(given).unwrap(), &schema);
        assert_eq!(checked(json!({"unit": "C", "days": 3, "at": [{"lat": 1}], "raw": null})), Ok(()));
        let wrong = |given: Value| checked(given).unwrap_err();
        assert_eq!(wrong(json!({"days": 3})), "`unit` is missing");
        assert_eq!(wrong(json!({"unit": "K"})), "`unit` must be one of \"C\", \"F\", not \"K\"");
        assert_eq!(wrong(json!({"unit": "C", "days": 1.5})), "`days` must be of type integer, not 1.5");
        assert_eq!(wrong(json!({"unit": "C", "days": 9})), "`days` must lie from 1 to 7, and is 9");
        assert_eq!(wrong(json!({"unit": "C", "at": [{"lat": 1}, {}]})), "`at[1].lat` is missing");
        assert_eq!(wrong(json!({"unit": "C", "speed": 1})), "`speed` is not known");
    }

    #[test]
    fn text_becomes_what_the_schema_wants_where_it_can() {
        let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}});
        let mut given = serde_json::from_value(json!({"n": " 3 ", "s": "4"})).unwrap();
        assert_eq!(check_arguments(&mut given, &schema), Ok(()));
        assert_eq!(Value::Object(given), json!({"n": 3, "s": "4"}));
    }

    #[test]
    fn an_optional_argument_takes_null_and_a_union_is_read_by_the_first_schema_that_fits() {
        let schema = json!({"type": "object", "properties": {
            "nullable": {"type": "integer", "nullable": true}, "unit": {"enum": ["C", "F"], "nullable": true},
            "listed": {"type": ["integer", "null"]}, "text": {"type": "string", "nullable": true},
            "any": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": null},
            "either": {"anyOf": [{"type": "number"}, {"type": "string"}]},
            "several": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}], "nullable": true}}});
        let read = |given: Value| {
            let mut given = serde_json::from_value(given).unwrap();
            check_arguments(&mut given, &schema).map(|()| Value::Object(given))
        };
        for key in ["nullable", "unit", "listed", "text", "any", "several"] {
            assert_eq!(read(json!({key: null})), Ok(json!({key: null})), "{key}");
        }
        // Some formats write every argument as text.
        for key in ["nullable", "listed", "any", "several"] {
            assert_eq!(read(json!({key: "null"})), Ok(json!({key: null})), "{key}");
            assert_eq!(read(json!({key: "3"})), Ok(json!({key: 3})), "{key}");
        }
        assert_eq!(read(json!({"text": "null"})), Ok(json!({"text": "null"})));
        assert_eq!(read(json!({"several": "[1, 2]"})), Ok(json!({"several": [1, 2]})));
        assert_eq!(read(json!({"either": "012"})), Ok(json!({"either": "012"})), "a text that fits stays a text");
        let wrong = |given: Value| read(given).unwrap_err();
        assert_eq!(wrong(json!({"nullable": 1.5})), "`nullable` must be of type integer or null, not 1.5");
        assert_eq!(
            wrong(json!({"any": "x"})),
            "`any` must be of type integer, not \"x\"; or `any` must be of type null, not \"x\""
        );
        assert_eq!(wrong(json!({"unit": "K"})), "`unit` must be one of \"C\", \"F\", not \"K\"");
    }
}
