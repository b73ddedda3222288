//! What metrics, spans and the log show.

#[cfg(feature = "metrics")]
mod counted {
    use std::collections::HashMap;
    use std::io;

    use axum::body::Body;
    use http::request::Parts;
    use http::{Method, Request};
    use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
    use tower_slots::{ConcurrencyLimitLayer, Limiter, OnOutage};

    use crate::support::{
        Down, Script, active, app, data, endless, next, origins, request, send, text, until,
    };
    use crate::upgrade;

    fn recorded(make: impl FnOnce() -> ConcurrencyLimitLayer) -> (ConcurrencyLimitLayer, Snapshotter) {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        (metrics::with_local_recorder(&recorder, make), snapshotter)
    }

    /// Every counter and histogram that is not at zero, as `name{label}`.
    fn counts(snapshotter: &Snapshotter) -> HashMap<String, u64> {
        let series = snapshotter.snapshot().into_vec().into_iter();
        let counted = series.filter_map(|(key, _, _, value)| {
            let value = match value {
                DebugValue::Counter(n) => n,
                DebugValue::Histogram(samples) => samples.len() as u64,
                DebugValue::Gauge(_) => 0,
            };
            let label = key
                .key()
                .labels()
                .find(|label| label.key() != "policy")
                .map(|label| label.value().to_owned());
            let name = key.key().name().trim_start_matches("tower_slots_");
            (value > 0).then(|| (format!("{name}{{{}}}", label.unwrap_or_default()), value))
        });
        counted.collect()
    }

    fn of(counts: &HashMap<String, u64>, prefix: &str) -> Vec<(String, u64)> {
        let mut found: Vec<_> = counts
            .iter()
            .filter(|(name, _)| name.starts_with(prefix))
            .map(|(name, n)| (name[prefix.len()..].to_owned(), *n))
            .collect();
        found.sort();
        found
    }

    fn pairs(expected: &[(&str, u64)]) -> Vec<(String, u64)> {
        expected.iter().map(|(name, n)| (format!("{{{name}}}"), *n)).collect()
    }

    #[tokio::test]
    async fn each_request_counts_once() {
        let (layer, snapshotter) = recorded(|| ConcurrencyLimitLayer::in_memory(1));
        let app = endless(layer.skip(|parts: &Parts| parts.uri.path() == "/health"));
        let _held = send(&app, request("acme")).await;
        send(&app, request("acme")).await;
        send(&app, request("")).await;
        send(&app, Request::get("/health").body(Body::empty()).expect("a request")).await;
        let expected = pairs(&[("admitted", 1), ("invalid_key", 1), ("rejected", 1), ("skipped", 1)]);
        assert_eq!(of(&counts(&snapshotter), "requests_total"), expected);
    }

    #[tokio::test]
    async fn in_shadow_a_refusal_counts_as_one_that_would_be() {
        let (layer, snapshotter) = recorded(|| ConcurrencyLimitLayer::in_memory(1).shadow(true));
        let app = endless(layer.clone());
        let _held = send(&app, request("acme")).await;
        send(&app, request("acme")).await;
        send(&app, request("")).await;
        let heavy = endless(layer.weight(|_: &Parts| 2));
        send(&heavy, request("acme")).await;
        let expected = pairs(&[("admitted", 1), ("would_reject", 3)]);
        assert_eq!(of(&counts(&snapshotter), "requests_total"), expected);

        for policy in [OnOutage::Refuse, OnOutage::Local { share: 0.0 }] {
            let (layer, snapshotter) = recorded(|| {
                let limiter = Limiter::builder(Down).limit(1).on_outage(policy).build();
                ConcurrencyLimitLayer::new(limiter.expect("valid settings")).shadow(true)
            });
            assert_eq!(text(send(&origins(layer), request("acme")).await).await, "none");
            let expected = pairs(&[("would_reject", 1)]);
            assert_eq!(of(&counts(&snapshotter), "requests_total"), expected, "{policy:?}");
        }
    }

    #[tokio::test]
    async fn a_hold_is_counted_by_how_it_ended() {
        let (layer, snapshotter) = recorded(|| ConcurrencyLimitLayer::in_memory(9));
        let broken = || Script::new([data(), Err(io::Error::other("broken"))]);
        let app = app(layer.clone(), move |_| broken());

        drop(send(&app, request("dropped")).await);
        let mut response = send(&app, request("error")).await;
        while next(response.body_mut()).await != "error" {}
        text(send(&origins(layer.clone()), request("completed")).await).await;
        let mut head = request("completed");
        *head.method_mut() = Method::HEAD;
        drop(send(&app, head).await);
        let drained = send(&app, request("lost")).await;
        assert_eq!(layer.limiter().drain("lost").await.expect("the store answers"), 1);
        text(drained.map(|_| Body::empty())).await;

        let expected = pairs(&[("completed", 2), ("dropped", 1), ("error", 1), ("lost", 1)]);
        assert_eq!(of(&counts(&snapshotter), "slot_hold_seconds"), expected);
    }

    #[tokio::test]
    async fn a_lost_slot_counts_as_lost_although_its_body_ended_well() {
        let (layer, snapshotter) = recorded(|| ConcurrencyLimitLayer::in_memory(9));
        let response = send(&origins(layer.clone()), request("acme")).await;
        layer.limiter().drain("acme").await.expect("the store answers");
        text(response).await;
        assert_eq!(of(&counts(&snapshotter), "slot_hold_seconds"), pairs(&[("lost", 1)]));
    }

    #[tokio::test]
    async fn upgrades_count_by_whether_their_slot_is_held() {
        for (upgrade, holds) in upgrade::ALL.into_iter().flat_map(|by| [(by, true), (by, false)]) {
            let (layer, snapshotter) = recorded(|| ConcurrencyLimitLayer::in_memory(1));
            let server = upgrade::serve(&layer, holds).await;
            for _ in 0..2 {
                upgrade.open(server).await.expect("a free slot").echo().await;
                until(async || active(layer.limiter(), "acme").await == 0).await;
            }
            let counts = counts(&snapshotter);
            let (unheld, end) = if holds { (0, "upgraded") } else { (2, "completed") };
            let counted = counts.get("upgrade_unheld_total{}").copied().unwrap_or(0);
            assert_eq!(counted, unheld, "{upgrade:?}");
            assert_eq!(of(&counts, "slot_hold_seconds"), pairs(&[(end, 2)]), "{upgrade:?}");
        }
    }
}

#[cfg(feature = "tracing")]
mod logged {
    use std::cell::RefCell;
    use std::fmt::{Debug, Write};
    use std::sync::Once;

    use tower::{Layer as _, Service};
    use tower_slots::ConcurrencyLimitLayer;
    use tower_slots::key::{TrustedProxies, extension, header, peer_ip, trusted_proxy_ip};
    use tracing::field::{Empty, Field, Visit};
    use tracing::{Event, Instrument, Subscriber, span};
    use tracing_subscriber::layer::{Context, SubscriberExt};
    use tracing_subscriber::{Layer, Registry};

    use crate::support::{Plain, request};
    use crate::upgrade;

    thread_local! {
        /// All that was recorded and logged on this test's thread.
        static LOG: RefCell<String> = const { RefCell::new(String::new()) };
    }

    struct Capture;

    fn note(text: std::fmt::Arguments<'_>) {
        LOG.with_borrow_mut(|log| log.write_fmt(text).expect("room"));
    }

    impl Visit for Capture {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            note(format_args!("{field}={value:?} "));
        }
    }

    impl<S: Subscriber> Layer<S> for Capture {
        fn on_record(&self, _: &span::Id, values: &span::Record<'_>, _: Context<'_, S>) {
            values.record(&mut Self);
        }

        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            // HTTP's own crates have much to tell.
            if !event.metadata().target().starts_with("tower_slots") {
                return;
            }
            note(format_args!("[{} ", event.metadata().level()));
            event.record(&mut Self);
            note(format_args!("]"));
        }
    }

    /// One subscriber for all tests: those of single threads race for what is enabled where.
    fn capture() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let subscriber = Registry::default().with(Capture);
            tracing::subscriber::set_global_default(subscriber).expect("the only subscriber");
        });
    }

    fn captured() -> String {
        LOG.take()
    }

    fn fields() -> tracing::Span {
        tracing::info_span!(
            "r",
            policy = Empty,
            decision = Empty,
            limit = Empty,
            active = Empty,
            key_hash = Empty
        )
    }

    #[tokio::test]
    async fn a_span_that_declares_them_learns_the_decisions_fields() {
        capture();
        let mut service = ConcurrencyLimitLayer::in_memory(1).layer(Plain);
        service.call(request("secret-project")).instrument(fields()).await.expect("infallible");
        let text = captured();
        assert!(
            text.starts_with(r#"policy="concurrency" decision="admitted" limit=1 active=1 key_hash="#),
            "{text}"
        );
        let hash = text.trim_end().rsplit('=').next().expect("a hash");
        assert!(hash.len() == 8 && hash.bytes().all(|b| b.is_ascii_hexdigit()), "{text}");
    }

    #[tokio::test]
    async fn a_refusal_is_a_debug_event_without_the_id() {
        capture();
        let mut service = ConcurrencyLimitLayer::in_memory(0).layer(Plain);
        service.call(request("secret-project")).instrument(fields()).await.expect("infallible");
        service.call(request("")).await.expect("infallible");
        let text = captured();
        assert!(text.contains(r#"decision="rejected" limit=0 active=0 key_hash="#), "{text}");
        assert_eq!(text.matches("[DEBUG message=request refused").count(), 2, "{text}");
        assert!(text.contains(r#"decision="invalid_key""#), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }

    #[tokio::test]
    async fn mistakes_are_loud_and_said_once() {
        capture();
        let layer = ConcurrencyLimitLayer::in_memory(1);
        let mut secret = layer.clone().key(header("cookie")).layer(Plain);
        let mut unset = layer.key(extension::<String>(|id: &String| id.clone())).layer(Plain);
        for _ in 0..2 {
            secret.call(request("acme")).await.expect("infallible");
            unset.call(request("acme")).await.expect("infallible");
        }
        let text = captured();
        assert_eq!(text.matches("[ERROR").count(), 2, "{text}");
        assert_eq!(text.matches("holds secrets").count(), 1, "{text}");
        assert_eq!(text.matches("alloc::string::String").count(), 1, "{text}");
    }

    #[tokio::test]
    async fn upgrades_that_nobody_holds_are_said_once() {
        capture();
        for upgrade in upgrade::ALL {
            let server = upgrade::serve(&ConcurrencyLimitLayer::in_memory(1), false).await;
            for _ in 0..2 {
                upgrade.open(server).await.expect("a free slot").echo().await;
            }
            let text = captured();
            assert_eq!(text.matches("[WARN").count(), 1, "{upgrade:?}: {text}");
            assert!(text.contains("upgraded without its slot"), "{upgrade:?}: {text}");
        }
    }

    #[tokio::test]
    async fn an_address_that_nobody_sets_is_said_once() {
        capture();
        let layer = ConcurrencyLimitLayer::in_memory(1);
        let hops = trusted_proxy_ip(TrustedProxies::hops(1));
        let networks = TrustedProxies::networks(["10.0.0.0/8"]).expect("a valid range");
        let mut direct = layer.clone().key(peer_ip()).layer(Plain);
        let mut proxied = layer.clone().key(trusted_proxy_ip(networks)).layer(Plain);
        let mut hopping = layer.key(hops).layer(Plain);
        for _ in 0..2 {
            direct.call(request("secret-project")).await.expect("infallible");
            proxied.call(request("secret-project")).await.expect("infallible");
            hopping.call(request("secret-project")).await.expect("infallible");
        }
        let text = captured();
        assert_eq!(text.matches("[ERROR").count(), 2, "{text}");
        assert_eq!(text.matches("into_make_service_with_connect_info").count(), 2, "{text}");
        assert_eq!(text.matches("[WARN message=no x-forwarded-for").count(), 1, "{text}");
        assert!(!text.contains("secret"), "{text}");
    }

    #[cfg(feature = "axum")]
    #[tokio::test]
    async fn an_extractor_that_cannot_work_is_said_once() {
        use axum::extract::Extension;
        use http::StatusCode;
        use tower_slots::key::extract;

        capture();
        let key = extract::<Extension<String>>(|id| id.0.clone());
        let mut service = ConcurrencyLimitLayer::in_memory(1).key_async(key).layer(Plain);
        for _ in 0..2 {
            let response = service.call(request("acme")).await.expect("infallible");
            assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        }
        let text = captured();
        assert_eq!(text.matches("[ERROR").count(), 1, "{text}");
        assert!(text.contains("Extension<alloc::string::String>"), "{text}");
    }
}
