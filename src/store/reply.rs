use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// A store's answer: there already, or on its way.
///
/// A store that answers at once pays for no allocation and no task switch.
///
/// # Panics
///
/// Polling it again after it was ready panics.
pub struct Reply<T>(Inner<T>);

enum Inner<T> {
    Ready(Option<T>),
    Later(Pin<Box<dyn Future<Output = T> + Send>>),
}

impl<T> Reply<T> {
    /// An answer that is there.
    pub fn ready(value: T) -> Self {
        Self(Inner::Ready(Some(value)))
    }

    /// An answer that comes when `future` is done.
    pub fn later(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self(Inner::Later(Box::pin(future)))
    }

    /// The answer if it is there, else the reply itself.
    pub(crate) fn into_ready(self) -> Result<T, Self> {
        match self.0 {
            Inner::Ready(Some(value)) => Ok(value),
            other => Err(Self(other)),
        }
    }
}

impl<T: Unpin> Future for Reply<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match &mut self.0 {
            Inner::Ready(value) => Poll::Ready(value.take().expect("`Reply` polled after it was ready")),
            Inner::Later(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Inner::Ready(_) => "Reply::Ready",
            Inner::Later(_) => "Reply::Later",
        })
    }
}
