//! A client's session: the packet filter in front of `gdbstub`.
//!
//! `gdbstub` gets whole, well-formed packets while the machine is paused, and never sees
//! acknowledgements or Ctrl-C. What it lacks is answered here: `?` with the true reason, detach and
//! kill, lists of threads, branch traces. An error that it takes for fatal costs the client that one
//! packet: a fresh state machine takes its place.

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;

use gdbstub::conn::Connection;
use gdbstub::stub::GdbStub;
use gdbstub::stub::state_machine::GdbStubStateMachine;

use crate::gdb::debugger::{Debugger, Reason, cpu_of};
use crate::gdb::framing::{self, BODY_MAX, Framer, Item};
use crate::gdb::registers::Place;
use crate::gdb::stop;
use crate::gdb::target::{self, RegisterNumber};
use crate::gdb::threads;
use crate::vcpu::debug::stop::StopReason;

/// Where `gdbstub` writes to.
#[derive(Clone, Debug, Default)]
struct Output(Rc<RefCell<Vec<u8>>>);

impl Connection for Output {
    type Error = Infallible;

    fn write(&mut self, byte: u8) -> Result<(), Infallible> {
        self.0.borrow_mut().push(byte);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}

type Machine = GdbStubStateMachine<'static, Debugger, Output>;

/// What becomes of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It goes on.
    Stay,
    /// The client has detached: the machine runs on without it.
    Detached,
    /// The client has ended the machine.
    Killed,
}

/// Things that a client may have read in parts.
#[derive(Debug, Default)]
struct Transfer {
    object: String,
    text: Vec<u8>,
}

/// One client's session.
pub(super) struct Session {
    framer: Framer,
    stub: Option<Machine>,
    output: Output,
    /// Acknowledgements are given and taken.
    acknowledges: bool,
    /// The last packet sent, for a client that did not understand it.
    last: Vec<u8>,
    /// The client waits for the machine to stop.
    running: bool,
    transfer: Transfer,
    /// The last `Hg` and the features of the client, for a fresh state machine.
    thread: Option<Vec<u8>>,
    supported: Option<Vec<u8>>,
    /// The last `Hc` named no thread.
    any_thread: bool,
    /// Registers that the client has written since it last sent another packet.
    written: usize,
    to_send: Vec<u8>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("running", &self.running)
            .finish_non_exhaustive()
    }
}

impl Session {
    pub(super) fn new() -> Self {
        Self {
            framer: Framer::default(),
            stub: None,
            output: Output::default(),
            acknowledges: true,
            last: Vec::new(),
            running: false,
            transfer: Transfer::default(),
            thread: None,
            supported: None,
            any_thread: true,
            written: 0,
            to_send: Vec::new(),
        }
    }

    /// Takes what is to be sent to the client.
    pub(super) fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.to_send)
    }

    /// Takes bytes from the client.
    pub(super) fn receive(&mut self, debugger: &mut Debugger, bytes: &[u8]) -> Next {
        for &byte in bytes {
            let Some(item) = self.framer.push(byte) else {
                continue;
            };
            let next = self.serve(debugger, item);
            if next != Next::Stay {
                return next;
            }
        }
        Next::Stay
    }

    fn serve(&mut self, debugger: &mut Debugger, item: Item) -> Next {
        match item {
            Item::Interrupt => self.interrupt(debugger),
            Item::Nack => self.to_send.extend_from_slice(&self.last),
            Item::Corrupt if self.acknowledges => self.to_send.push(b'-'),
            // Nothing can be lost or changed on the way any more: what it was, it was meant so.
            Item::Corrupt => self.reply(b"E01"),
            Item::TooLong => {
                self.acknowledge();
                self.reply(b"E01");
            }
            Item::Packet(body) => {
                self.acknowledge();
                return self.packet(debugger, &body);
            }
        }
        Next::Stay
    }

    fn acknowledge(&mut self) {
        if self.acknowledges {
            self.to_send.push(b'+');
        }
    }

    fn reply(&mut self, body: &[u8]) {
        tracing::trace!(target: "gdb", "-> {}", body.escape_ascii());
        self.last = framing::frame(body);
        self.to_send.extend_from_slice(&self.last);
    }

    fn packet(&mut self, debugger: &mut Debugger, body: &[u8]) -> Next {
        tracing::trace!(target: "gdb", "<- {}", body.escape_ascii());
        if self.running {
            // The client may only interrupt now; a packet has no answer before the stop.
            return Next::Stay;
        }
        self.written = match body {
            [b'P', ..] => self.written.saturating_add(1),
            _ => 0,
        };
        match body {
            b"QStartNoAckMode" => {
                self.reply(b"OK");
                self.acknowledges = false;
            }
            b"?" => self.tell_reason(debugger),
            b"k" => {
                // gdb is gone by then; lldb waits for it.
                self.reply(b"X09");
                return Next::Killed;
            }
            _ if body.starts_with(b"vKill;") => {
                self.reply(b"OK");
                return Next::Killed;
            }
            [b'D'] | [b'D', b';', ..] => {
                self.reply(b"OK");
                return Next::Detached;
            }
            b"vMustReplyEmpty" => self.reply(b""),
            _ if body.starts_with(b"vCont")
                && body != b"vCont?"
                && !is_resumption(body, debugger.cpus()) =>
            {
                self.reply(b"E01");
            }
            [b'H', b'c' | b'g', id @ ..] if !names_thread(id, debugger.cpus()) => {
                self.reply(b"E01")
            }
            _ if body.starts_with(b"Qbtrace") => self.set_trace(debugger, body),
            _ if body.starts_with(b"qXfer:") => self.transfer(debugger, body),
            [b'm', range @ ..] => self.read_memory(debugger, range),
            [b'P', write @ ..] if self.written > RESTORING && is_kept(debugger, write) => {
                self.reply(b"OK");
            }
            // Clients for x86 step the thread back that they look at, and name none.
            b"bs" if self.any_thread => {
                debugger.steps_back = Some(self.current());
                self.pass(debugger, body);
            }
            _ => self.pass(debugger, body),
        }
        Next::Stay
    }

    /// Hands a packet to `gdbstub`, made harmless, and sends its answer.
    fn pass(&mut self, debugger: &mut Debugger, body: &[u8]) {
        debugger.current = self.current();
        match self.feed(debugger, body) {
            Some(answers) => {
                let good = answers.first().is_some_and(|answer| answer == b"OK");
                if good && body.starts_with(b"Hg") {
                    self.thread = Some(body.to_vec());
                }
                if good && let [b'H', b'c', id @ ..] = body {
                    self.any_thread = is_any(id);
                }
                if body.starts_with(b"qSupported") {
                    self.supported = Some(body.to_vec());
                }
                for mut answer in answers {
                    if body.starts_with(b"qSupported") {
                        answer = supported(&answer);
                    }
                    self.reply(&answer);
                }
            }
            None => self.reply(b"E01"),
        }
    }

    /// `m`. `gdbstub` cannot read less than it is asked for.
    fn read_memory(&mut self, debugger: &mut Debugger, range: &[u8]) {
        let read = parse_range(range).ok_or(22).and_then(|(at, len)| {
            let read = debugger.read_memory(self.current(), at, len);
            read.map_err(|error| target::errno(&error))
        });
        match read {
            Ok(bytes) => self.reply(framing::hex(&bytes).as_bytes()),
            Err(errno) => self.reply(format!("E{errno:02x}").as_bytes()),
        }
    }

    /// The bodies that `gdbstub` answers with; `None` after an error that it cannot go on from.
    fn feed(&mut self, debugger: &mut Debugger, body: &[u8]) -> Option<Vec<Vec<u8>>> {
        let mut machine = self.stub.take().or_else(|| self.fresh(debugger))?;
        for byte in framing::frame(body) {
            let fed = match machine {
                GdbStubStateMachine::Idle(inner) => inner.incoming_data(debugger, byte),
                GdbStubStateMachine::Running(inner) => inner.incoming_data(debugger, byte),
                // No Ctrl-C and no detaching ever gets there.
                GdbStubStateMachine::CtrlCInterrupt(_) | GdbStubStateMachine::Disconnected(_) => {
                    return None;
                }
            };
            match fed {
                Ok(next) => machine = next,
                Err(error) => {
                    tracing::debug!(target: "gdb", "{}: {error}", body.escape_ascii());
                    self.output.0.borrow_mut().clear();
                    return None;
                }
            }
        }
        self.running = matches!(machine, GdbStubStateMachine::Running(_));
        self.stub = Some(machine);
        Some(self.take_answers())
    }

    fn take_answers(&mut self) -> Vec<Vec<u8>> {
        let written = std::mem::take(&mut *self.output.0.borrow_mut());
        framing::bodies(&written)
    }

    /// A state machine that knows what the client told the one before it.
    fn fresh(&mut self, debugger: &mut Debugger) -> Option<Machine> {
        self.output.0.borrow_mut().clear();
        let stub = GdbStub::builder(self.output.clone())
            .packet_buffer_size(BUFFER)
            .build()
            .ok()?;
        let mut machine = stub.run_state_machine(debugger).ok()?;
        let first = b"Hg0".to_vec();
        let told = self.supported.clone().into_iter();
        for body in told.chain([first]).chain(self.thread.clone()) {
            for byte in framing::frame(&body) {
                machine = match machine {
                    GdbStubStateMachine::Idle(inner) => inner.incoming_data(debugger, byte).ok()?,
                    _ => return None,
                };
            }
        }
        self.output.0.borrow_mut().clear();
        Some(machine)
    }

    /// Answers `?`.
    fn tell_reason(&mut self, debugger: &mut Debugger) {
        let reason = debugger.reason.clone();
        match self.stop_reply(debugger, &reason) {
            Some(answers) => answers.iter().for_each(|answer| self.reply(answer)),
            None => self.reply(b"E01"),
        }
    }

    /// The stop reply of `gdbstub` with expedited registers. It gives one only when it believes that
    /// the machine runs.
    fn stop_reply(&mut self, debugger: &mut Debugger, reason: &Reason) -> Option<Vec<Vec<u8>>> {
        let machine = match self.stub.take() {
            Some(machine @ GdbStubStateMachine::Running(_)) => machine,
            machine => {
                // Let it believe so: `vCont` without a machine behind it.
                debugger.pretend = true;
                self.stub = machine;
                self.feed(debugger, b"vCont;c");
                debugger.pretend = false;
                self.stub.take()?
            }
        };
        let GdbStubStateMachine::Running(inner) = machine else {
            return None;
        };
        let values = expedited(debugger, reason);
        let mut registers = values
            .iter()
            .map(|(number, value)| (RegisterNumber(*number), value.as_slice()));
        let stop = stop::stop_reason(debugger, reason);
        let reported = inner.report_stop_with_regs(debugger, stop, &mut registers);
        self.running = false;
        self.thread = Some(format!("Hgp1.{:x}", reason.cpu + 1).into_bytes());
        self.stub = Some(reported.ok()?);
        Some(self.take_answers())
    }

    /// The machine stopped while the client waits for that.
    pub(super) fn stopped(&mut self, debugger: &mut Debugger, reason: &Reason) {
        if !self.running {
            return;
        }
        if let Some(remark) = stop::remark(debugger, reason) {
            self.reply(format!("O{}", framing::hex(remark.as_bytes())).as_bytes());
        }
        match self.stop_reply(debugger, reason) {
            Some(answers) => answers.iter().for_each(|answer| self.reply(answer)),
            None => self.reply(b"S05"),
        }
        self.running = false;
    }

    /// The machine has ended: its status, or `None` if it was ended.
    pub(super) fn ended(&mut self, status: Option<u8>) {
        if self.running {
            match status {
                Some(status) => self.reply(format!("W{status:02x};process:1").as_bytes()),
                None => self.reply(b"X09;process:1"),
            }
            self.running = false;
        }
    }

    fn interrupt(&mut self, debugger: &mut Debugger) {
        if !self.running {
            return;
        }
        if let Ok(reason) = debugger.interrupt() {
            self.stopped(debugger, &reason);
        }
    }

    /// `Qbtrace` and `Qbtrace-conf`.
    fn set_trace(&mut self, debugger: &mut Debugger, body: &[u8]) {
        let cpu = self.current();
        let size = body
            .strip_prefix(b"Qbtrace-conf:bts:size=0x")
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| usize::from_str_radix(digits, 16).ok());
        let done = match (body, size) {
            (_, Some(size)) => {
                debugger.set_trace_size(size);
                Ok(())
            }
            (b"Qbtrace:bts", _) => debugger.start_trace(cpu),
            (b"Qbtrace:off", _) => debugger.stop_trace(cpu),
            _ => return self.reply(b"E01"),
        };
        match done {
            Ok(()) => self.reply(b"OK"),
            Err(error) => self.reply(format!("E.{error}.").as_bytes()),
        }
    }

    /// `qXfer:OBJECT:read:ANNEX:OFFSET,LENGTH`.
    fn transfer(&mut self, debugger: &mut Debugger, body: &[u8]) {
        let Some((object, offset, length)) = parse_transfer(body) else {
            return self.reply(b"E00");
        };
        if object.starts_with("features:") {
            return self.pass(debugger, body);
        }
        if offset == 0 || self.transfer.object != object {
            let text = match object.as_str() {
                "threads:" => threads::list(debugger),
                "btrace-conf:" => match debugger.trace_configuration(self.current()) {
                    Ok(text) => text,
                    Err(error) => return self.reply(format!("E.{error}.").as_bytes()),
                },
                object => match object.strip_prefix("btrace:") {
                    Some(annex) => match debugger.trace(self.current(), annex) {
                        Ok(text) => text,
                        Err(error) => return self.reply(error.as_bytes()),
                    },
                    None => return self.reply(b""),
                },
            };
            self.transfer = Transfer {
                object,
                text: text.into_bytes(),
            };
        }
        let text = &self.transfer.text;
        let from = offset.min(text.len());
        let to = from
            .saturating_add(length.min(BODY_MAX / 2))
            .min(text.len());
        let mut answer = vec![if to == text.len() { b'l' } else { b'm' }];
        answer.extend(framing::escape(&text[from..to]));
        self.reply(&answer);
    }

    /// The processor that the client looks at.
    pub(super) fn current(&self) -> usize {
        let text = self.thread.as_deref().unwrap_or(b"Hg1");
        let text = String::from_utf8_lossy(text);
        let digits = text.rsplit(['.', 'g', 'p']).next().unwrap_or("1");
        let id = usize::from_str_radix(digits, 16).ok();
        id.and_then(std::num::NonZeroUsize::new).map_or(0, cpu_of)
    }
}

/// Where `gdbstub`'s buffer begins, in bytes; it grows with longer packets. With every packet it searches
/// all of it.
const BUFFER: usize = 1024;

/// What is told besides the features that `gdbstub` tells.
const FEATURES: &[u8] = b";QStartNoAckMode+;qXfer:threads:read+;Qbtrace:bts+;Qbtrace:off+;\
    qXfer:btrace:read+;Qbtrace-conf:bts:size+;qXfer:btrace-conf:read+";

/// The features that `gdbstub` tells, with ours.
fn supported(told: &[u8]) -> Vec<u8> {
    // What is longer than its buffer is taken as well.
    let size = format!("PacketSize={BODY_MAX:x}");
    let others = told.iter().position(|&byte| byte == b';').unwrap_or(0);
    [size.as_bytes(), &told[others..], FEATURES].concat()
}

/// Registers that a client asks for at every stop: a stop reply carries them. After a step those that
/// frames are found by, at a breakpoint all that its condition may name.
fn expedited(debugger: &mut Debugger, reason: &Reason) -> Vec<(usize, Vec<u8>)> {
    let cpu = reason.cpu;
    let general: &[usize] = match reason.stop {
        Some(StopReason::Hit(_)) => &[4, 5, 0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        _ => &[4, 5],
    };
    let general = general.iter().map(|&number| Place::General(number));
    let mut values = Vec::new();
    for place in [Place::Pc, Place::Flags].into_iter().chain(general) {
        let Some(number) = debugger.layout().number(place) else {
            continue;
        };
        let Some(register) = debugger.layout().all().get(number).cloned() else {
            continue;
        };
        if let Ok(value) = debugger.read_register(cpu, &register) {
            values.push((number, value));
        }
    }
    values
}

/// So many registers in a row write only those clients that restore all of them, after they called a function of
/// the guest's.
const RESTORING: usize = 16;

/// Whether `P` names a register that is described with save-restore="no", which gdb's code for x86 does not heed:
/// time, say, does not go back.
fn is_kept(debugger: &Debugger, write: &[u8]) -> bool {
    let number = write.split(|&byte| byte == b'=').next();
    let number = number.and_then(|digits| std::str::from_utf8(digits).ok());
    let number = number.and_then(|digits| usize::from_str_radix(digits, 16).ok());
    let register = number.and_then(|number| debugger.layout().all().get(number));
    register.is_some_and(|register| register.group().is_some())
}

/// The address and the length of `m`, which is no longer than its answer may be.
fn parse_range(range: &[u8]) -> Option<(u64, usize)> {
    let (at, len) = std::str::from_utf8(range).ok()?.split_once(',')?;
    let (at, len) = (u64::from_str_radix(at, 16), usize::from_str_radix(len, 16));
    Some((at.ok()?, len.ok()?.min(BODY_MAX / 2 - 64)))
}

/// A `vCont` packet that says something, of processors that there are. `gdbstub` would take one that
/// does not for the wish that nobody moves, and never answer.
fn is_resumption(body: &[u8], cpus: usize) -> bool {
    let Ok(text) = std::str::from_utf8(body) else {
        return false;
    };
    let Some(actions) = text.strip_prefix("vCont;") else {
        return false;
    };
    actions.split(';').all(|action| {
        let (kind, thread) = match action.split_once(':') {
            Some((kind, thread)) => (kind, Some(thread)),
            None => (action, None),
        };
        let known = match kind.split_at_checked(1) {
            Some(("c" | "s", "")) => true,
            Some(("C" | "S", signal)) => u8::from_str_radix(signal, 16).is_ok(),
            Some(("r", range)) => range.split_once(',').is_some_and(|(from, to)| {
                u64::from_str_radix(from, 16).is_ok() && u64::from_str_radix(to, 16).is_ok()
            }),
            _ => false,
        };
        let there = thread.is_none_or(|thread| match tid(thread) {
            "-1" => true,
            tid => is_processor(tid, cpus),
        });
        known && there
    })
}

/// The thread of an id, without the process.
fn tid(id: &str) -> &str {
    id.rsplit('.').next().unwrap_or(id)
}

/// Whether a thread's number is that of a processor.
fn is_processor(tid: &str, cpus: usize) -> bool {
    usize::from_str_radix(tid, 16).is_ok_and(|tid| (1..=cpus).contains(&tid))
}

/// Whether the id of `Hc` or `Hg` names no thread, or all.
fn is_any(id: &[u8]) -> bool {
    std::str::from_utf8(id).is_ok_and(|id| matches!(tid(id), "0" | "-1"))
}

/// Whether the id of `Hc` or `Hg` names a processor that there is, or any.
fn names_thread(id: &[u8], cpus: usize) -> bool {
    is_any(id) || std::str::from_utf8(id).is_ok_and(|id| is_processor(tid(id), cpus))
}

/// The object with its annex, the offset and the length.
fn parse_transfer(body: &[u8]) -> Option<(String, usize, usize)> {
    let text = std::str::from_utf8(body.strip_prefix(b"qXfer:")?).ok()?;
    let (object, rest) = text.split_once(":read:")?;
    let (annex, range) = rest.rsplit_once(':')?;
    let (offset, length) = range.split_once(',')?;
    Some((
        format!("{object}:{annex}"),
        usize::from_str_radix(offset, 16).ok()?,
        usize::from_str_radix(length, 16).ok()?,
    ))
}
