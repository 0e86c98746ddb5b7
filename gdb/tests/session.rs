//! Sessions without a socket: packets in, replies out, with the machine of `examples/toy`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../examples/toy/toy/mod.rs"]
mod toy;

use hindsight_gdb::framing::{PacketDecoder, PacketEvent, encode_packet};
use hindsight_gdb::{ClientSession, Debugger, SessionStatus};
use proptest::prelude::*;
use toy::ToyMachine;

/// A toy that is paused, its debugger, and a client that has just connected.
fn connect() -> (ToyMachine, Debugger, ClientSession) {
    let machine = ToyMachine::start().unwrap();
    let mut debugger = Debugger::new(Box::new(machine.target()));
    debugger.interrupt().unwrap();
    (machine, debugger, ClientSession::new())
}

/// Sends a packet and returns the bodies of the replies.
fn ask(debugger: &mut Debugger, session: &mut ClientSession, body: &str) -> Vec<String> {
    let _ = session.receive(debugger, &encode_packet(body.as_bytes()));
    let mut decoder = PacketDecoder::default();
    let output = session.take_output();
    let events = output.into_iter().filter_map(|byte| decoder.push(byte));
    events
        .map(|event| match event {
            PacketEvent::Packet(body) => String::from_utf8(body).unwrap(),
            event => panic!("{event:?}"),
        })
        .collect()
}

#[test]
fn continue_replies_when_a_breakpoint_is_met() {
    let (_machine, mut debugger, mut session) = connect();
    let (debugger, session) = (&mut debugger, &mut session);
    assert_eq!(ask(debugger, session, "Z1,10000b,1"), ["OK"]);
    assert_eq!(ask(debugger, session, "vCont;c"), [""; 0]);
    assert_eq!(ask(debugger, session, "g"), [""; 0], "the machine runs");
    let stop = loop {
        if let Some(stop) = debugger.collect().unwrap() {
            break stop;
        }
    };
    session.report_stop(debugger, &stop);
    let output = String::from_utf8(session.take_output()).unwrap();
    assert!(output.contains("$T05thread:01;hwbreak:;"), "{output}");
    assert_eq!(ask(debugger, session, "p10"), ["0b00100000000000"]);
}

#[test]
fn refused_resume_is_a_pending_stop() {
    let (_machine, mut debugger, mut session) = connect();
    let (debugger, session) = (&mut debugger, &mut session);
    // monitor catch exception
    let command = "qRcmd,636174636820657863657074696f6e";
    assert_eq!(ask(debugger, session, command).last().unwrap(), "OK");
    assert_eq!(ask(debugger, session, "vCont;c"), [""; 0]);
    assert!(debugger.has_pending_stop());
    let stop = debugger.collect().unwrap().unwrap();
    session.report_stop(debugger, &stop);
    let output = String::from_utf8(session.take_output()).unwrap();
    assert!(output.contains("$T05"), "{output}");
}

#[test]
fn detach_and_kill_are_left_to_the_caller() {
    let (machine, mut debugger, mut session) = connect();
    let packet = encode_packet(b"D;1");
    assert_eq!(
        session.receive(&mut debugger, &packet),
        SessionStatus::Detached
    );
    let mut session = ClientSession::new();
    let packet = encode_packet(b"k");
    assert_eq!(
        session.receive(&mut debugger, &packet),
        SessionStatus::Killed
    );
    debugger.kill();
    assert_eq!(machine.wait(), None);
}

/// Beginnings of packets that the server parses.
const STARTS: &str = "(\\?|g|G|D|p|P|m|M|X|H[gc]|T|vCont;[csrCS]|vCont\\?|Z[0-4],|z[0-4],|b[cs]|qC\
    |qSupported:|qRcmd,|qXfer:(features|threads|btrace|btrace-conf):read:|Qbtrace:(bts|off)\
    |Qbtrace-conf:bts:size=0x|vFile:(open|pread|fstat|close|setfs):|QStartNoAckMode)";

/// Packets that are nearly valid, or any bytes.
fn piece() -> impl Strategy<Value = Vec<u8>> {
    let near = proptest::string::string_regex(&format!("{STARTS}[0-9a-f,:;.=-]{{0,20}}")).unwrap();
    prop_oneof![
        4 => near.prop_map(|body| encode_packet(body.as_bytes())),
        1 => proptest::collection::vec(any::<u8>(), 0..40),
        1 => Just(vec![3]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_packets_leave_a_debugger_that_serves_the_next_client(
        pieces in proptest::collection::vec(piece(), 1..20),
    ) {
        let (_machine, mut debugger, mut session) = connect();
        for piece in pieces {
            if session.receive(&mut debugger, &piece) != SessionStatus::Open {
                break;
            }
            while debugger.has_pending_stop() {
                let stop = debugger.collect().unwrap().unwrap();
                session.report_stop(&mut debugger, &stop);
            }
            session.take_output();
        }
        debugger.detach();
        if debugger.interrupt().is_ok() {
            let mut session = ClientSession::new();
            prop_assert_eq!(ask(&mut debugger, &mut session, "Hgp1.1"), ["OK"]);
            prop_assert_eq!(ask(&mut debugger, &mut session, "p10")[0].len(), 16);
        }
    }
}
