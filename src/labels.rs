//! Enums whose variants are labels of metrics.

/// Declares an enum whose variants have fixed lower-case labels.
macro_rules! closed_set {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident = $label:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        $vis enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            #[allow(dead_code, reason = "read by metrics, which may be off")]
            pub(crate) const LABELS: &'static [&'static str] = &[$($label),+];

            /// The name in metrics and logs.
            #[must_use]
            #[allow(dead_code, reason = "not every set is logged")]
            $vis fn label(self) -> &'static str {
                Self::LABELS[self as usize]
            }
        }

        impl From<$name> for usize {
            fn from(value: $name) -> Self {
                value as Self
            }
        }
    };
}

pub(crate) use closed_set;
