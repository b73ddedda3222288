use http::request::Parts;

use super::KeyExtractor;
use crate::limiter::{KeyError, ProjectId};

/// One id for all requests: where only the bulkhead counts.
pub(in crate::layer) struct Everyone(Result<ProjectId, KeyError>);

impl Default for Everyone {
    fn default() -> Self {
        Self(ProjectId::new("everyone"))
    }
}

impl KeyExtractor for Everyone {
    fn extract(&self, _parts: &Parts) -> Result<Option<ProjectId>, KeyError> {
        self.0.clone().map(Some)
    }
}
