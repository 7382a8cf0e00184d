//! Macros that declare a section once: the Rust struct, the reader, the writer, the range checks
//! and the reference follow from the same lines.

/// Declares a section: `key: Type = default, limit;`. `#[formerly(old)]` above a key accepts its old name
/// with a warning. `first name: Section;` and `last name: Section;` include the keys of another section.
macro_rules! section {
    (
        $(#[doc = $doc:literal])+
        $(#[derive($($Derived:path),+)])?
        pub struct $Name:ident {
            $(first $head:ident: $Head:ty;)*
            $($(#[doc = $key_doc:literal])+ $(#[formerly($old:ident)])? $key:ident: $Type:ty = $default:expr $(, $limit:expr)?;)*
            $(last $tail:ident: $Tail:ty;)*
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq $(, $($Derived),+)?)]
        pub struct $Name {
            $(#[doc = concat!("Keys of `", stringify!($Head), "` in the same section.")] pub $head: $Head,)*
            $($(#[doc = $key_doc])+ pub $key: $Type,)*
            $(#[doc = concat!("Keys of `", stringify!($Tail), "` in the same section.")] pub $tail: $Tail,)*
        }

        impl Default for $Name {
            fn default() -> Self {
                $Name { $($head: <$Head>::default(),)* $($key: $default,)* $($tail: <$Tail>::default(),)* }
            }
        }

        impl $crate::settings::section::Section for $Name {
            fn doc() -> String {
                $crate::settings::section::sentence(&[$($doc),+])
            }
            fn take(reader: &mut $crate::settings::section::Reader<'_>) -> Self {
                let default = Self::default();
                $Name {
                    $($head: <$Head as $crate::settings::section::Section>::take(reader),)*
                    $($key: reader.key(stringify!($key)).unwrap_or(default.$key),)*
                    $($tail: <$Tail as $crate::settings::section::Section>::take(reader),)*
                }
            }
            fn rows(&self, rows: &mut Vec<(String, $crate::settings::setting::Written)>) {
                $(self.$head.rows(rows);)*
                $(rows.push((stringify!($key).to_owned(), $crate::settings::setting::Setting::write(&self.$key)));)*
                $(self.$tail.rows(rows);)*
            }
            fn check_rows(&self, path: &str, problems: &mut Vec<$crate::settings::setting::Problem>) {
                $(self.$head.check_rows(path, problems);)*
                $(
                    let key = $crate::settings::section::join(path, stringify!($key));
                    $crate::settings::setting::Setting::check(&self.$key, &key, problems);
                    $($crate::settings::section::check_limit(&self.$key, &$limit, key, problems);)?
                )*
                $(self.$tail.check_rows(path, problems);)*
            }
            fn describe_rows(path: &str, keys: &mut Vec<$crate::settings::setting::KeyDoc>) {
                let default = Self::default();
                $(<$Head as $crate::settings::section::Section>::describe_rows(path, keys);)*
                $($crate::settings::section::describe_key(
                    $crate::settings::section::join(path, stringify!($key)), &default.$key, &[$($limit.text)?], &[$(stringify!($old))?], &[$($key_doc),+], keys,
                );)*
                $(<$Tail as $crate::settings::section::Section>::describe_rows(path, keys);)*
            }
            fn rename_rows(path: &str, renames: &mut $crate::settings::renames::Renames) {
                $(<$Head as $crate::settings::section::Section>::rename_rows(path, renames);)*
                $(
                    $(renames.add(path, stringify!($old), stringify!($key));)?
                    <$Type as $crate::settings::setting::Setting>::renames(
                        &$crate::settings::section::join(path, stringify!($key)), renames,
                    );
                )*
                $(<$Tail as $crate::settings::section::Section>::rename_rows(path, renames);)*
            }
            fn shape() -> $crate::settings::shape::Shape {
                let default = Self::default();
                let mut shape = $crate::settings::shape::Shape::default();
                $(shape.join(<$Head as $crate::settings::section::Section>::shape());)*
                $(shape.key(
                    stringify!($key), &default.$key, &[$($limit.text)?], &[$(stringify!($old))?], &[$($key_doc),+],
                );)*
                $(shape.join(<$Tail as $crate::settings::section::Section>::shape());)*
                shape
            }
        }
    };
}

/// Declares a section whose other keys depend on its `kind`. The first kind is the default in Rust.
/// A recipe must name one, or have a key of the list after `by`, which implies its kind.
macro_rules! tagged {
    (
        $(#[doc = $doc:literal])+
        pub enum $Name:ident {
            $($(#[doc = $kind_doc:literal])+ $word:literal => $Variant:ident($Body:ident) $(by [$($by:ident),+])?,)+
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq)]
        // A plan has a few of them.
        #[allow(clippy::large_enum_variant)]
        pub enum $Name {
            $($(#[doc = $kind_doc])+ $Variant($Body),)+
        }

        impl $Name {
            /// The words of `kind`.
            #[allow(dead_code, reason = "few messages list them")]
            pub(crate) const KINDS: &[&str] = &[$($word),+];
        }

        impl Default for $Name {
            fn default() -> Self {
                [$(|| $Name::$Variant($Body::default())),+][0]()
            }
        }

        impl $crate::settings::section::Section for $Name {
            fn doc() -> String {
                $crate::settings::section::sentence(&[$($doc),+])
            }
            fn take(reader: &mut $crate::settings::section::Reader<'_>) -> Self {
                match reader.tag("kind", &[$(($word, &[$($(stringify!($by)),+)?])),+]) {
                    $(Some($word) => $Name::$Variant(<$Body as $crate::settings::section::Section>::take(reader)),)+
                    _ => Self::default(),
                }
            }
            fn rows(&self, rows: &mut Vec<(String, $crate::settings::setting::Written)>) {
                match self {
                    $($Name::$Variant(body) => {
                        rows.push(("kind".to_owned(), $crate::settings::setting::Setting::write(&$word.to_owned())));
                        body.rows(rows);
                    })+
                }
            }
            fn check_rows(&self, path: &str, problems: &mut Vec<$crate::settings::setting::Problem>) {
                match self {
                    $($Name::$Variant(body) => body.check_rows(path, problems),)+
                }
            }
            fn describe_rows(path: &str, keys: &mut Vec<$crate::settings::setting::KeyDoc>) {
                let kinds = [$(format!("`\"{}\"`: {}", $word, $crate::settings::section::sentence(&[$($kind_doc),+]))),+];
                keys.push($crate::settings::setting::KeyDoc {
                    path: $crate::settings::section::join(path, "kind"),
                    expects: "a word".to_owned(),
                    default: "required".to_owned(),
                    formerly: None,
                    doc: [kinds.join(" "), $crate::settings::section::implied(&[$(($word, &[$($(stringify!($by)),+)?])),+])].concat(),
                });
                $(
                    let own = keys.len();
                    <$Body as $crate::settings::section::Section>::describe_rows(path, keys);
                    for key in &mut keys[own..] {
                        key.doc = format!("With `kind = \"{}\"`: {}", $word, key.doc);
                    }
                )+
            }
            fn rename_rows(path: &str, renames: &mut $crate::settings::renames::Renames) {
                $(<$Body as $crate::settings::section::Section>::rename_rows(path, renames);)+
            }
            fn shape() -> $crate::settings::shape::Shape {
                let mut shape = $crate::settings::shape::Shape::default();
                $(shape.kind(
                    $word, &[$($(stringify!($by)),+)?], $crate::settings::section::sentence(&[$($kind_doc),+]),
                    <$Body as $crate::settings::section::Section>::shape(),
                );)+
                shape
            }
        }
    };
}

/// Declares a value that is one of a few words; the first is the default. A word may stand for a
/// variant with a field, which recipes leave at its default.
macro_rules! choices {
    (
        $(#[doc = $doc:literal])+
        pub enum $Name:ident {
            $(
                $(#[doc = $word_doc:literal])+
                $word:literal => $Variant:ident $({ $(#[doc = $field_doc:literal])+ $field:ident: $Type:ty = $default:expr })?,
            )+
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $Name {
            $($(#[doc = $word_doc])+ $Variant $({ $(#[doc = $field_doc])+ $field: $Type })?,)+
        }

        impl $Name {
            /// Every choice, the default first.
            pub const ALL: &[$Name] = &[$($Name::$Variant $({ $field: $default })?),+];

            /// The word that recipes use.
            pub fn word(self) -> &'static str {
                match self {
                    $($Name::$Variant { .. } => $word,)+
                }
            }
        }

        impl Default for $Name {
            fn default() -> Self {
                Self::ALL[0]
            }
        }

        impl serde::Serialize for $Name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.word())
            }
        }

        impl<'de> serde::Deserialize<'de> for $Name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let word = <std::borrow::Cow<'de, str> as serde::Deserialize>::deserialize(deserializer)?;
                let found = Self::ALL.iter().copied().find(|choice| choice.word() == word);
                found.ok_or_else(|| serde::de::Error::unknown_variant(&word, &[$($word),+]))
            }
        }

        impl $crate::settings::setting::Setting for $Name {
            fn expects() -> String {
                let words = [$(format!("`\"{}\"`: {}", $word, $crate::settings::section::sentence(&[$($word_doc),+]))),+];
                format!("a word. {}", words.join(" "))
            }
            fn schema() -> serde_json::Value {
                let words = [$(serde_json::json!({
                    "const": $word, "description": $crate::settings::section::sentence(&[$($word_doc),+]),
                })),+];
                serde_json::json!({"oneOf": words})
            }
            fn read(
                node: &$crate::settings::document::Node, path: &str, findings: &mut $crate::settings::section::Findings,
            ) -> Option<Self> {
                let word = $crate::settings::section::read_word(node, path, &[$($word),+], findings)?;
                Self::ALL.iter().copied().find(|choice| choice.word() == word)
            }
            fn write(&self) -> $crate::settings::setting::Written {
                $crate::settings::setting::Setting::write(&self.word().to_owned())
            }
        }
    };
}

pub(crate) use {choices, section, tagged};
