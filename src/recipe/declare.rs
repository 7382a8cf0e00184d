//! Declares a section once: the same lines are the Rust struct, the reader, the writer, the range checks and the reference, so that
//! none can drift from the others. The macros are for the modules beside this one.

/// Declares a section: `key: Type = default, limit;`. `first name: Section;` and `last name: Section;` put another section's keys
/// beside its own.
macro_rules! section {
    (
        $(#[doc = $doc:literal])+
        pub struct $Name:ident {
            $(first $head:ident: $Head:ty;)*
            $($(#[doc = $key_doc:literal])+ $key:ident: $Type:ty = $default:expr $(, $limit:expr)?;)*
            $(last $tail:ident: $Tail:ty;)*
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq)]
        pub struct $Name {
            $(#[doc = concat!("Keys that stand beside these: [`", stringify!($Head), "`].")] pub $head: $Head,)*
            $($(#[doc = $key_doc])+ pub $key: $Type,)*
            $(#[doc = concat!("Keys that stand beside these: [`", stringify!($Tail), "`].")] pub $tail: $Tail,)*
        }

        impl Default for $Name {
            fn default() -> Self {
                $Name { $($head: <$Head>::default(),)* $($key: $default,)* $($tail: <$Tail>::default(),)* }
            }
        }

        impl super::section::Section for $Name {
            fn doc() -> String {
                super::section::sentence(&[$($doc),+])
            }
            fn take(reader: &mut super::section::Reader<'_>) -> Self {
                let default = Self::default();
                $Name {
                    $($head: <$Head as super::section::Section>::take(reader),)*
                    $($key: reader.key(stringify!($key)).unwrap_or(default.$key),)*
                    $($tail: <$Tail as super::section::Section>::take(reader),)*
                }
            }
            fn rows(&self, rows: &mut Vec<(String, super::setting::Written)>) {
                $(self.$head.rows(rows);)*
                $(rows.push((stringify!($key).to_owned(), super::setting::Setting::write(&self.$key)));)*
                $(self.$tail.rows(rows);)*
            }
            fn check_rows(&self, path: &str, problems: &mut Vec<super::setting::Problem>) {
                $(self.$head.check_rows(path, problems);)*
                $(
                    let key = super::section::join(path, stringify!($key));
                    super::setting::Setting::check(&self.$key, &key, problems);
                    $(super::section::check_limit(&self.$key, &$limit, key, problems);)?
                )*
                $(self.$tail.check_rows(path, problems);)*
            }
            fn describe_rows(path: &str, keys: &mut Vec<super::setting::KeyDoc>) {
                let default = Self::default();
                $(<$Head as super::section::Section>::describe_rows(path, keys);)*
                $(super::section::describe_key(
                    super::section::join(path, stringify!($key)), &default.$key, &[$($limit.text)?], &[$($key_doc),+], keys,
                );)*
                $(<$Tail as super::section::Section>::describe_rows(path, keys);)*
            }
            fn shape() -> super::schema::Shape {
                let default = Self::default();
                let mut shape = super::schema::Shape::default();
                $(shape.join(<$Head as super::section::Section>::shape());)*
                $(shape.key(stringify!($key), &default.$key, &[$($limit.text)?], &[$($key_doc),+]);)*
                $(shape.join(<$Tail as super::section::Section>::shape());)*
                shape
            }
        }
    };
}

/// Declares a section whose `kind` says which other keys it has. The first kind is the default of a plan made in Rust; a recipe must
/// name one.
macro_rules! tagged {
    (
        $(#[doc = $doc:literal])+
        pub enum $Name:ident {
            $($(#[doc = $kind_doc:literal])+ $word:literal => $Variant:ident($Body:ident),)+
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq)]
        pub enum $Name {
            $($(#[doc = $kind_doc])+ $Variant($Body),)+
        }

        impl Default for $Name {
            fn default() -> Self {
                [$(|| $Name::$Variant($Body::default())),+][0]()
            }
        }

        impl super::section::Section for $Name {
            fn doc() -> String {
                super::section::sentence(&[$($doc),+])
            }
            fn take(reader: &mut super::section::Reader<'_>) -> Self {
                match reader.tag("kind", &[$($word),+]) {
                    $(Some($word) => $Name::$Variant(<$Body as super::section::Section>::take(reader)),)+
                    _ => Self::default(),
                }
            }
            fn rows(&self, rows: &mut Vec<(String, super::setting::Written)>) {
                match self {
                    $($Name::$Variant(body) => {
                        rows.push(("kind".to_owned(), super::setting::Setting::write(&$word.to_owned())));
                        body.rows(rows);
                    })+
                }
            }
            fn check_rows(&self, path: &str, problems: &mut Vec<super::setting::Problem>) {
                match self {
                    $($Name::$Variant(body) => body.check_rows(path, problems),)+
                }
            }
            fn describe_rows(path: &str, keys: &mut Vec<super::setting::KeyDoc>) {
                let kinds = [$(format!("`\"{}\"`: {}", $word, super::section::sentence(&[$($kind_doc),+]))),+];
                keys.push(super::setting::KeyDoc {
                    path: super::section::join(path, "kind"),
                    expects: "a word".to_owned(),
                    default: "required".to_owned(),
                    doc: kinds.join(" "),
                });
                $(
                    let own = keys.len();
                    <$Body as super::section::Section>::describe_rows(path, keys);
                    for key in &mut keys[own..] {
                        key.doc = format!("With `kind = \"{}\"`: {}", $word, key.doc);
                    }
                )+
            }
            fn shape() -> super::schema::Shape {
                let mut shape = super::schema::Shape::default();
                $(shape.kind(
                    $word, super::section::sentence(&[$($kind_doc),+]), <$Body as super::section::Section>::shape(),
                );)+
                shape
            }
        }
    };
}

/// Declares a value that is one of a few words; the first is the default.
macro_rules! choices {
    (
        $(#[doc = $doc:literal])+
        pub enum $Name:ident {
            $($(#[doc = $word_doc:literal])+ $word:literal => $Variant:ident,)+
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $Name {
            $($(#[doc = $word_doc])+ $Variant,)+
        }

        impl $Name {
            /// The word that recipes use.
            pub fn word(self) -> &'static str {
                match self {
                    $($Name::$Variant => $word,)+
                }
            }
        }

        impl Default for $Name {
            fn default() -> Self {
                [$($Name::$Variant),+][0]
            }
        }

        impl super::setting::Setting for $Name {
            fn expects() -> String {
                let words = [$(format!("`\"{}\"`: {}", $word, super::section::sentence(&[$($word_doc),+]))),+];
                format!("a word. {}", words.join(" "))
            }
            fn schema() -> serde_json::Value {
                let words = [$(serde_json::json!({
                    "const": $word, "description": super::section::sentence(&[$($word_doc),+]),
                })),+];
                serde_json::json!({"oneOf": words})
            }
            fn read(
                node: &super::document::Node, path: &str, findings: &mut super::section::Findings,
            ) -> Option<Self> {
                let word = super::section::read_word(node, path, &[$($word),+], findings)?;
                [$($Name::$Variant),+].into_iter().find(|choice| choice.word() == word)
            }
            fn write(&self) -> super::setting::Written {
                super::setting::Setting::write(&self.word().to_owned())
            }
        }
    };
}

pub(crate) use {choices, section, tagged};
