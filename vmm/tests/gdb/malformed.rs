//! Clients that send malformed packets, or disconnect at any time.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::rig::{Client, Guest, Run};

/// Malformed packets, and well-formed ones that no vCPU can carry out.
const BAD: &[&str] = &[
    "m",
    "m0",
    "m0,",
    "m,1",
    "mzz,1",
    "m0,ffffffffffffffff",
    "mffffffffffffffff,ffff",
    "m123456789abcdef0123,4",
    "M0,4:12",
    "Mffffffff0000,1:00",
    "X0,10:",
    "p",
    "pzzzz",
    "pffffffffffffffffff",
    "pffff",
    "P0",
    "P0=",
    "Pffff=00",
    "P10=zz",
    "G",
    "G00",
    "Gzz",
    "Z",
    "Z9,0,0",
    "Z0",
    "Z0,,",
    "Z2,0,ffffffffffffffff",
    "Z2,ffffffffffffffff,8",
    "z1,1",
    "vCont",
    "vCont;",
    "vCont;x",
    "vCont;s",
    "vCont;r1,2",
    "vCont;r2",
    "vCont;s:p1.ffffffff",
    "vCont;t",
    "vNoSuch;1",
    "H",
    "Hx1",
    "Hg-2",
    "Hgp1.ffffff",
    "Hgp1.-1",
    "T",
    "Tp1.99",
    "qXfer:",
    "qXfer:features:read:target.xml:ffffffffffffffff,ffffffffffffffff",
    "qXfer:features:read:../etc/passwd:0,10",
    "qXfer:threads:read::0,ffffffffffffffff",
    "qXfer:threads:write::0:",
    "qXfer:nothing:read::0,10",
    "qRcmd,",
    "qRcmd,zz",
    "qRcmd,6",
    "qSupported:;;;===",
    "QStart",
    "qThreadExtraInfo,",
    "R",
    "!",
    "",
];

#[test]
fn malformed_packets_get_a_reply_and_change_nothing() {
    let run = Run::waiting(Guest::Long("spin"), &[]);
    let mut client = run.connect();
    client.ask("qSupported:multiprocess+");
    let good = client.ask("g");
    assert!(good.len() > 1000, "{good}");
    for bad in BAD {
        client.packet(bad.as_bytes());
        let mut answer = client.answer();
        while answer.starts_with('O') && answer != "OK" {
            answer = client.answer();
        }
        let short = answer.len() < 0x2_0000;
        assert!(short, "{bad}: {} bytes", answer.len());
        client.ask("Hgp1.1");
        assert!(client.ask("p10").len() == 16, "after {bad}");
    }
    client.packet(b"k");
    assert_eq!(run.finish().0, Some(0));
}

#[test]
fn bytes_outside_of_packets_are_skipped() {
    let run = Run::start(Guest::Long("spin"), &[]);
    let mut client = run.connect();
    client.send(b"hello, debugger\r\n\r\n");
    client.send(&[0xff; 300]);
    client.send(b"$g#00");
    assert_eq!(client.ask("?").get(..3), Some("T02"));
    let huge = vec![b'a'; 300_000];
    client.packet(&huge);
    assert_eq!(client.answer(), "E01");
    client.send(b"--");
    assert_eq!(
        client.answer(),
        "E01",
        "once for requests that arrive together"
    );
    assert_eq!(client.ask("?").get(..3), Some("T02"));
    drop(client);
    let mut client = run.connect();
    assert_eq!(client.ask("?").get(..3), Some("T02"));
}

/// What a client may send: packets that are nearly valid, with a valid checksum or not, and other
/// bytes. None of them ends the machine.
fn piece() -> impl Strategy<Value = Vec<u8>> {
    let packet = |body: Vec<u8>, good: bool| {
        let sum = body.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        let sum = if good { sum } else { !sum };
        [b"$", &*body, format!("#{sum:02x}").as_bytes()].concat()
    };
    let known = proptest::sample::select(BAD);
    let changed = (known, any::<proptest::sample::Index>(), any::<u8>());
    let changed = changed.prop_map(|(body, index, byte)| {
        let mut body = body.as_bytes().to_vec();
        if !body.is_empty() {
            let at = index.index(body.len());
            body[at] = byte;
        }
        body
    });
    let starts =
        "(vCont;[cs]|vFile:(open|pread|fstat|close|setfs):|Z[0-4],|z[0-4],|qXfer:|m|X|H[gc]|T|p|P)";
    let near = proptest::string::string_regex(&format!("{starts}[0-9a-f,:;.=-]{{0,20}}")).unwrap();
    let near = near.prop_map(String::into_bytes);
    let harmless = prop_oneof![changed, near].prop_filter("ends the machine", |body| {
        !body.starts_with(b"k") && !body.starts_with(b"vKill") && !body.starts_with(b"R")
    });
    prop_oneof![
        4 => (harmless, any::<bool>()).prop_map(move |(body, good)| packet(body, good)),
        1 => proptest::collection::vec(any::<u8>().prop_filter("k", |b| *b != b'k'), 0..40),
        1 => Just(vec![3]),
        1 => Just(b"$".repeat(3)),
        1 => (1_usize..100_000).prop_map(|len| vec![b'a'; len]),
    ]
}

/// The next client, once the previous one has disconnected.
fn next_client(run: &Run) -> Client {
    loop {
        let mut client = run.connect();
        client.packet(b"?");
        if client
            .try_answer()
            .is_some_and(|answer| answer.starts_with('T'))
        {
            return client;
        }
    }
}

#[test]
fn any_bytes_leave_a_server_that_accepts_the_next_client() {
    let run = Run::start(Guest::Long("spin"), &[]);
    let config = Config {
        cases: 60,
        failure_persistence: None,
        ..Config::default()
    };
    let streams = proptest::collection::vec(piece(), 1..12);
    let checked = TestRunner::new(config).run(&(streams, any::<bool>()), |(pieces, second)| {
        let mut client = run.connect();
        for piece in &pieces {
            client.send(piece);
        }
        if second {
            run.connect().send(b"$?#3f");
        }
        drop(client);
        let mut client = next_client(&run);
        // The next client finds a machine without breakpoints.
        prop_assert_eq!(client.ask("Hgp1.1"), "OK");
        prop_assert_eq!(client.ask("p10").len(), 16);
        Ok(())
    });
    checked.unwrap();
    assert!(!run.stderr().contains("panicked"), "{}", run.stderr());
}

#[test]
fn second_client_is_refused() {
    let run = Run::start(Guest::Long("spin"), &[]);
    let mut first = run.connect();
    first.ask("?");
    let mut second = run.connect();
    second.packet(b"?");
    assert_eq!(second.rest(), b"");
    assert_eq!(first.ask("?").get(..3), Some("T02"));
    drop(first);
    let text = run.gdb("info threads\n");
    assert!(text.contains("vCPU 0"), "{text}");
}

#[test]
fn guest_runs_after_a_client_disconnects() {
    let run = Run::start(Guest::Long("spin"), &[]);
    let count = |run: &Run| {
        let mut client = run.connect();
        client.ask("p10")
    };
    // Clients disconnect within a packet, while the guest runs, and while breakpoints are set.
    run.connect().send(b"$m2000");
    let mut client = run.connect();
    client.ask("Z0,200000,1");
    client.ask("Z2,201000,8");
    client.packet(b"vCont;c");
    drop(client);
    let mut client = run.connect();
    client.packet(b"vCont;c");
    client.send(&[3]);
    assert_eq!(client.answer().get(..1), Some("T"));
    drop(client);
    count(&run);
    assert!(!run.stderr().contains("panicked"), "{}", run.stderr());
}

#[test]
fn interrupt_stops_the_guest_in_every_state() {
    let run = Run::waiting(Guest::Long("two"), &["--cpus", "2"]);
    let mut client = run.connect();
    client.send(&[3, 3, 3]);
    assert_eq!(client.ask("?").get(..3), Some("T02"));
    for _ in 0..50 {
        client.packet(b"vCont;c");
        client.send(&[3]);
        assert_eq!(client.answer().get(..1), Some("T"));
        client.send(&[3]);
    }
    assert!(client.ask("m200000,4").len() == 8);
    for wrong in ["P0=", "P0=00", "G00"] {
        assert_eq!(client.ask(wrong).get(..2), Some("E."), "{wrong}");
    }
    for (id, exists) in [
        ("p1.2", true),
        ("0", true),
        ("p1.3", false),
        ("p9.9", false),
    ] {
        let answer = if exists { "OK" } else { "E01" };
        assert_eq!(client.ask(&format!("Hg{id}")), answer, "{id}");
    }
}

#[test]
fn http_request_closes_the_connection_before_its_body_is_read() {
    let run = Run::waiting(Guest::Sample, &[]);
    let mut client = run.connect();
    client.send(b"POST / HTTP/1.1\r\nHost: localhost:1234\r\n\r\n$k#6b");
    assert!(client.rest().is_empty());
    let mut client = run.connect();
    assert!(client.ask("?").starts_with('T'));
}

#[test]
fn last_packet_is_repeated_once_for_many_requests() {
    let run = Run::waiting(Guest::Sample, &[]);
    let mut client = run.connect();
    let reply = client.ask("m200000,800");
    client.send(&[b'-'; 4000]);
    assert_eq!(client.answer(), reply);
    client.send(b"$k#6b");
    // Requests that arrived in other pieces may have been answered too.
    let rest = client.rest();
    assert!(rest.len() < reply.len() * 100, "{} bytes", rest.len());
}
