//! Macros that declare a section once: the Rust type, the reader, the writer, the range checks and the
//! description follow from the same lines.

/// Declares a section: `key: Type = default, limit;`. `#[formerly(old)]` above a key accepts its old name
/// with a warning. `first name: Section;` and `last name: Section;` include the keys of another section.
#[macro_export]
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

        const _: () = {
            #[allow(unused_imports)]
            use $crate::{error::Problem, keys::Keys, section::{self, Reader, Section}, setting::{Setting, Written}};

            impl Section for $Name {
                fn take(reader: &mut Reader<'_>) -> Self {
                    let default = Self::default();
                    $Name {
                        $($head: <$Head as Section>::take(reader),)*
                        $($key: reader.key(stringify!($key)).unwrap_or(default.$key),)*
                        $($tail: <$Tail as Section>::take(reader),)*
                    }
                }
                fn rows(&self, rows: &mut Vec<(String, Written)>) {
                    $(self.$head.rows(rows);)*
                    $(rows.push((stringify!($key).to_owned(), Setting::write(&self.$key)));)*
                    $(self.$tail.rows(rows);)*
                }
                fn check_rows(&self, path: &str, problems: &mut Vec<Problem>) {
                    $(self.$head.check_rows(path, problems);)*
                    $(section::check(&self.$key, path, stringify!($key), &[$(&$limit)?], problems);)*
                    $(self.$tail.check_rows(path, problems);)*
                }
                fn keys() -> Keys {
                    let default = Self::default();
                    let mut keys = Keys::of(&[$($doc),+]);
                    $(keys.join(<$Head as Section>::keys());)*
                    $(keys.add(
                        stringify!($key), &default.$key, &[$($limit.text)?], &[$(stringify!($old))?], &[$($key_doc),+],
                    );)*
                    $(keys.join(<$Tail as Section>::keys());)*
                    keys
                }
            }
        };
    };
}

/// Declares a section whose other keys depend on its `kind`, as another section or in place. The first
/// kind is the default in Rust. A recipe must name one, or have a key of the list after `by`, which
/// implies its kind.
#[macro_export]
macro_rules! tagged {
    (
        $(#[doc = $doc:literal])+
        pub enum $Name:ident {
            $(
                $(#[doc = $kind_doc:literal])+
                $word:literal => $Variant:ident
                $(($Body:ident))?
                $({ $($(#[doc = $key_doc:literal])+ $key:ident: $Type:ty = $default:expr $(, $limit:expr)?;)+ })?
                $(by [$($by:ident),+])?,
            )+
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq)]
        // A plan has a few of them.
        #[allow(clippy::large_enum_variant)]
        pub enum $Name {
            $($(#[doc = $kind_doc])+ $Variant $(($Body))? $({ $($(#[doc = $key_doc])+ $key: $Type),+ })?,)+
        }

        impl $Name {
            /// The words of `kind`.
            #[allow(dead_code, reason = "few messages list them")]
            pub(crate) const KINDS: &[&str] = &[$($word),+];
        }

        impl Default for $Name {
            fn default() -> Self {
                [$(|| $Name::$Variant $(($Body::default()))? $({ $($key: $default),+ })?),+][0]()
            }
        }

        const _: () = {
            #[allow(unused_imports)]
            use $crate::{error::Problem, keys::Keys, section::{self, Reader, Section}};
            use $crate::setting::{Setting, Written};

            impl Section for $Name {
                fn take(reader: &mut Reader<'_>) -> Self {
                    match reader.tag("kind", &[$(($word, &[$($(stringify!($by)),+)?])),+]) {
                        $(Some($word) => $Name::$Variant
                            $((<$Body as Section>::take(reader)))?
                            $({ $($key: reader.key(stringify!($key)).unwrap_or($default)),+ })?,)+
                        _ => Self::default(),
                    }
                }
                fn rows(&self, rows: &mut Vec<(String, Written)>) {
                    match self {
                        $($Name::$Variant $(($crate::named!(body $Body)))? $({ $($key),+ })? => {
                            rows.push(("kind".to_owned(), Setting::write(&$word.to_owned())));
                            $(<$Body as Section>::rows(body, rows);)?
                            $($(rows.push((stringify!($key).to_owned(), Setting::write($key)));)+)?
                        })+
                    }
                }
                fn check_rows(&self, path: &str, problems: &mut Vec<Problem>) {
                    match self {
                        $($Name::$Variant $(($crate::named!(body $Body)))? $({ $($key),+ })? => {
                            $(<$Body as Section>::check_rows(body, path, problems);)?
                            $($(section::check($key, path, stringify!($key), &[$(&$limit)?], problems);)+)?
                        })+
                    }
                }
                fn keys() -> Keys {
                    let mut keys = Keys::of(&[$($doc),+]);
                    $({
                        #[allow(unused_mut)]
                        let mut inside = Keys::default();
                        $(inside.join(<$Body as Section>::keys());)?
                        $($(inside.add::<$Type>(stringify!($key), &$default, &[$($limit.text)?], &[], &[$($key_doc),+]);)+)?
                        keys.kind(($word, &[$($(stringify!($by)),+)?]), &[$($kind_doc),+], inside);
                    })+
                    keys
                }
            }
        };
    };
}

/// `$name`, for each `$Of`.
#[doc(hidden)]
#[macro_export]
macro_rules! named {
    ($name:ident $Of:ident) => {
        $name
    };
}

/// Declares a value that is one of a few words; the first is the default. A word may stand for a
/// variant with a field, which recipes leave at its default.
#[macro_export]
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

        impl $crate::serde::Serialize for $Name {
            fn serialize<S: $crate::serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.word())
            }
        }

        impl<'de> $crate::serde::Deserialize<'de> for $Name {
            fn deserialize<D: $crate::serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let word = <std::borrow::Cow<'de, str> as $crate::serde::Deserialize>::deserialize(deserializer)?;
                let found = Self::ALL.iter().copied().find(|choice| choice.word() == word);
                found.ok_or_else(|| $crate::serde::de::Error::unknown_variant(&word, &[$($word),+]))
            }
        }

        const _: () = {
            use $crate::{document::Node, keys::sentence, section::{self, Findings}, setting::{Setting, Written}};

            impl Setting for $Name {
                fn expects() -> String {
                    let words = [$(format!("`\"{}\"`: {}", $word, sentence(&[$($word_doc),+]))),+];
                    format!("a word. {}", words.join(" "))
                }
                fn schema() -> $crate::serde_json::Value {
                    let words = [$($crate::serde_json::json!({"const": $word, "description": sentence(&[$($word_doc),+])})),+];
                    $crate::serde_json::json!({"oneOf": words})
                }
                fn read(node: &Node, path: &str, findings: &mut Findings) -> Option<Self> {
                    let word = section::read_word(node, path, &[$($word),+], findings)?;
                    Self::ALL.iter().copied().find(|choice| choice.word() == word)
                }
                fn write(&self) -> Written {
                    Setting::write(&self.word().to_owned())
                }
            }
        };
    };
}

pub use crate::{choices, section, tagged};
