//! The session: which packets the filter answers, and which `gdbstub` does.

use super::packets::{self, RESTORED_REGISTERS};
use super::proxy::StubProxy;
use super::supported::with_own_features;
use super::transfer::{DocumentTransfer, TransferReply};
use super::{region, restart};
use crate::debugger::{DebugStop, Debugger};
use crate::framing::{self, PacketDecoder, PacketEvent};
use crate::stop_reply;
use crate::stub::errno;
use crate::thread_id;

/// The state of a session after a client's bytes were processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum SessionStatus {
    /// The session continues.
    Open,
    /// The client has detached: call [`Debugger::detach`] and close the connection.
    Detached,
    /// The client has ended the machine: call [`Debugger::kill`].
    Killed,
}

/// How many bytes of output wait for [`ClientSession::take_output`] before no more input is
/// processed, apart from the replies to one packet.
const OUTPUT_MAX: usize = 1 << 18;

/// One client's session.
///
/// It neither reads nor writes a socket: the caller passes in what arrives by
/// [`ClientSession::receive`] and sends what [`ClientSession::take_output`] returns.
pub struct ClientSession {
    decoder: PacketDecoder,
    proxy: StubProxy,
    /// Packets are acknowledged.
    acknowledges: bool,
    /// The last packet sent, for a client that requests it again.
    last_sent: Vec<u8>,
    /// The output has that packet again. However often the client requests it, once is enough.
    repeated: bool,
    /// The client waits for the machine to stop.
    running: bool,
    transfer: DocumentTransfer,
    /// The last `Hc` named no thread.
    resumes_any_thread: bool,
    /// How many registers the client has written since it last sent another packet.
    register_writes: usize,
    /// The client uses the extended protocol, in which it may restart what it has killed.
    extended: bool,
    /// The client has killed the machine, and has not restarted it.
    killed: bool,
    output: Vec<u8>,
}

impl std::fmt::Debug for ClientSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientSession")
            .field("running", &self.running)
            .finish_non_exhaustive()
    }
}

impl Default for ClientSession {
    fn default() -> Self {
        Self::new()
    }
}

impl ClientSession {
    /// The session of a client that has just connected, to a machine that is paused.
    pub fn new() -> Self {
        Self {
            decoder: PacketDecoder::default(),
            proxy: StubProxy::default(),
            acknowledges: true,
            last_sent: Vec::new(),
            repeated: false,
            running: false,
            transfer: DocumentTransfer::default(),
            resumes_any_thread: true,
            register_writes: 0,
            extended: false,
            killed: false,
            output: Vec::new(),
        }
    }

    /// Whether the client has killed the machine: call [`Debugger::kill`] when it disconnects. In
    /// the extended protocol it may go on with another run instead.
    pub const fn has_killed(&self) -> bool {
        self.killed
    }

    /// Takes the bytes to send to the client.
    pub fn take_output(&mut self) -> Vec<u8> {
        self.repeated = false;
        std::mem::take(&mut self.output)
    }

    /// Processes bytes from the client, in pieces of any size.
    ///
    /// Afterwards, while [`Debugger::has_pending_stop`] says so, call [`Debugger::collect`] and
    /// report the stop.
    pub fn receive(&mut self, debugger: &mut Debugger, bytes: &[u8]) -> SessionStatus {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (count, status) = self.receive_some(debugger, rest);
            if status != SessionStatus::Open {
                return status;
            }
            rest = &rest[count..];
        }
        SessionStatus::Open
    }

    /// As [`ClientSession::receive`], but stops when there is much output, which the caller sends
    /// before it passes in the rest. Returns the number of bytes processed, which is not 0.
    pub fn receive_some(
        &mut self,
        debugger: &mut Debugger,
        bytes: &[u8],
    ) -> (usize, SessionStatus) {
        for (count, &byte) in (1..).zip(bytes) {
            let Some(event) = self.decoder.push(byte) else {
                continue;
            };
            let status = self.process(debugger, event);
            if status != SessionStatus::Open || self.output.len() >= OUTPUT_MAX {
                return (count, status);
            }
        }
        (bytes.len(), SessionStatus::Open)
    }

    /// Reports a stop of the machine, if the client waits for one.
    pub fn report_stop(&mut self, debugger: &mut Debugger, stop: &DebugStop) {
        if !self.running {
            return;
        }
        if let Some(message) = stop_reply::message(debugger, stop) {
            self.reply(format!("O{}", framing::hex(message.as_bytes())).as_bytes());
        }
        match self.stop_replies(debugger, stop) {
            Some(bodies) => bodies.iter().for_each(|body| self.reply(body)),
            None => self.reply(b"S05"),
        }
        self.running = false;
    }

    /// Reports that the machine has ended, if the client waits for a stop: with the exit status, or
    /// as killed.
    pub fn report_end(&mut self, status: Option<u8>) {
        if self.running {
            match status {
                Some(status) => self.reply(format!("W{status:02x};process:1").as_bytes()),
                None => self.reply(b"X09;process:1"),
            }
            self.running = false;
        }
    }

    fn process(&mut self, debugger: &mut Debugger, event: PacketEvent) -> SessionStatus {
        match event {
            PacketEvent::Interrupt => self.interrupt(debugger),
            PacketEvent::Nack => {
                if !std::mem::replace(&mut self.repeated, true) {
                    self.output.extend_from_slice(&self.last_sent);
                }
            }
            PacketEvent::Corrupt if self.acknowledges => self.output.push(b'-'),
            // Without acknowledgements the client cannot be made to send it again.
            PacketEvent::Corrupt => self.reply(b"E01"),
            PacketEvent::TooLong => {
                self.acknowledge();
                self.reply(b"E01");
            }
            PacketEvent::Packet(body) => {
                self.acknowledge();
                return self.packet(debugger, &body);
            }
        }
        SessionStatus::Open
    }

    fn acknowledge(&mut self) {
        if self.acknowledges {
            self.output.push(b'+');
        }
    }

    fn reply(&mut self, body: &[u8]) {
        tracing::trace!(target: "gdb", "-> {}", body.escape_ascii());
        self.last_sent = framing::encode_packet(body);
        self.output.extend_from_slice(&self.last_sent);
    }

    fn interrupt(&mut self, debugger: &mut Debugger) {
        if !self.running {
            return;
        }
        if let Ok(stop) = debugger.interrupt() {
            self.report_stop(debugger, &stop);
        }
    }

    fn packet(&mut self, debugger: &mut Debugger, body: &[u8]) -> SessionStatus {
        tracing::trace!(target: "gdb", "<- {}", body.escape_ascii());
        if self.running {
            // A client may only interrupt now: packets get no reply before the stop.
            return SessionStatus::Open;
        }
        self.register_writes = match body {
            [b'P', ..] => self.register_writes.saturating_add(1),
            _ => 0,
        };
        if let Some(status) = self.end_session(body) {
            return status;
        }
        let count = debugger.vcpu_count();
        match body {
            b"QStartNoAckMode" => {
                self.reply(b"OK");
                self.acknowledges = false;
            }
            b"!" if debugger.is_reversible() => {
                self.extended = true;
                self.reply(b"OK");
            }
            b"?" if self.killed => self.reply(b"W00"),
            b"?" => self.reply_last_stop(debugger),
            _ if self.extended && body.starts_with(b"vRun;") => self.restart(debugger, body),
            // There is nothing to debug before the next run.
            _ if self.killed && packets::needs_machine(body) => self.reply(b"E03"),
            b"vMustReplyEmpty" => self.reply(b""),
            b"vCont?" => self.pass(debugger, body),
            _ if body.starts_with(b"vCont") && !packets::is_resumption(body, count) => {
                self.reply(b"E01");
            }
            [b'H', b'c' | b'g', id @ ..] if !packets::names_thread(id, count) => {
                self.reply(b"E01");
            }
            _ if body.starts_with(b"Qbtrace") => self.control_trace(debugger, body),
            _ if body.starts_with(b"qXfer:") => self.read_document(debugger, body),
            [b'm', range @ ..] => self.read_memory(debugger, range),
            _ if body.starts_with(b"qMemoryRegionInfo:") => {
                let vcpu = self.proxy.selected();
                let reply = region::reply(debugger, vcpu, &body[18..]);
                self.reply(reply.as_bytes());
            }
            [b'P', write @ ..]
                if self.register_writes > RESTORED_REGISTERS
                    && packets::is_not_restored(debugger.layout(), write) =>
            {
                self.reply(b"OK");
            }
            // Clients for x86 step back the thread that they have selected, and do not name it.
            b"bs" if self.resumes_any_thread => {
                debugger.step_back_vcpu = Some(self.proxy.selected());
                self.pass(debugger, body);
            }
            _ => self.pass(debugger, body),
        }
        SessionStatus::Open
    }

    /// Answers the packets by which a client kills the machine or detaches; `None` for another
    /// packet.
    fn end_session(&mut self, body: &[u8]) -> Option<SessionStatus> {
        Some(match body {
            b"k" => {
                // gdb does not wait for a reply; lldb does.
                self.reply(b"X09");
                SessionStatus::Killed
            }
            _ if body.starts_with(b"vKill;") => {
                self.reply(b"OK");
                self.killed = true;
                match self.extended {
                    true => SessionStatus::Open,
                    false => SessionStatus::Killed,
                }
            }
            [b'D'] | [b'D', b';', ..] => {
                self.reply(b"OK");
                match self.killed {
                    true => SessionStatus::Killed,
                    false => SessionStatus::Detached,
                }
            }
            _ => return None,
        })
    }

    /// Hands a packet to `gdbstub` and sends its replies.
    fn pass(&mut self, debugger: &mut Debugger, body: &[u8]) {
        debugger.selected = self.proxy.selected();
        debugger.error_text = None;
        let Some(replies) = self.proxy.feed(debugger, body) else {
            return self.reply(b"E01");
        };
        self.running = self.proxy.is_running();
        let accepted = replies.first().is_some_and(|reply| reply == b"OK");
        if accepted && body.starts_with(b"Hg") {
            self.proxy.select(body);
        }
        if accepted && let [b'H', b'c', id @ ..] = body {
            self.resumes_any_thread = thread_id::is_any(id);
        }
        if body.starts_with(b"qSupported") {
            self.proxy.set_supported(body);
        }
        for mut reply in replies {
            if body.starts_with(b"qSupported") {
                reply = with_own_features(&reply, debugger.has_branch_trace());
            }
            if let Some(text) = debugger
                .error_text
                .take_if(|_| packets::shows_error(body, &reply))
            {
                reply = format!("E.{text}").into_bytes();
            }
            self.reply(&reply);
        }
    }

    /// Answers `vRun`.
    fn restart(&mut self, debugger: &mut Debugger, body: &[u8]) {
        let arguments = body.get(5..).map(String::from_utf8_lossy);
        let icount = restart::parse(&arguments.unwrap_or_default());
        match icount.and_then(|icount| debugger.restart_at(icount)) {
            Ok(_) => {
                self.killed = false;
                self.reply_last_stop(debugger);
            }
            Err(text) => self.reply(format!("E.{text}").as_bytes()),
        }
    }

    /// Answers `m`: `gdbstub` cannot return less than the client requests.
    fn read_memory(&mut self, debugger: &mut Debugger, range: &[u8]) {
        let invalid = errno::INVALID;
        let read = packets::parse_range(range).ok_or(invalid);
        let read = read.and_then(|(at, len)| {
            let read = debugger.read_memory(self.proxy.selected(), at, len);
            read.map_err(|error| errno::of(&error))
        });
        match read {
            Ok(bytes) => self.reply(framing::hex(&bytes).as_bytes()),
            Err(errno) => self.reply(format!("E{errno:02x}").as_bytes()),
        }
    }

    /// Answers `Qbtrace` and `Qbtrace-conf`.
    fn control_trace(&mut self, debugger: &mut Debugger, body: &[u8]) {
        let vcpu = self.proxy.selected();
        let size = body
            .strip_prefix(b"Qbtrace-conf:bts:size=0x")
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| usize::from_str_radix(digits, 16).ok());
        let done = match (body, size) {
            (_, Some(size)) => {
                debugger.set_trace_size(size);
                Ok(())
            }
            (b"Qbtrace:bts", _) => debugger.start_trace(vcpu),
            (b"Qbtrace:off", _) => debugger.stop_trace(vcpu),
            _ => return self.reply(b"E01"),
        };
        match done {
            Ok(()) => self.reply(b"OK"),
            Err(error) => self.reply(format!("E.{error}.").as_bytes()),
        }
    }

    /// Answers `qXfer`.
    fn read_document(&mut self, debugger: &mut Debugger, body: &[u8]) {
        let vcpu = self.proxy.selected();
        match self.transfer.reply(debugger, vcpu, body) {
            TransferReply::Body(reply) => self.reply(&reply),
            TransferReply::Pass => self.pass(debugger, body),
        }
    }

    /// Answers `?`.
    fn reply_last_stop(&mut self, debugger: &mut Debugger) {
        let stop = debugger.last_stop().clone();
        match self.stop_replies(debugger, &stop) {
            Some(bodies) => bodies.iter().for_each(|body| self.reply(body)),
            None => self.reply(b"E01"),
        }
    }

    /// The replies that report a stop.
    fn stop_replies(&mut self, debugger: &mut Debugger, stop: &DebugStop) -> Option<Vec<Vec<u8>>> {
        let reason = stop_reply::gdb_reason(debugger, stop);
        let registers = stop_reply::expedited_registers(debugger, stop);
        let proxy = &mut self.proxy;
        let replies = proxy.report_stop(debugger, stop.vcpu, reason, &registers);
        self.running = self.proxy.is_running();
        replies
    }
}
