//! vCPUs as the client's threads: `p1.N` is vCPU N - 1.

use std::fmt::Write as _;

use crate::debugger::Debugger;
use crate::modes;

/// The list of threads that `qXfer:threads:read` returns.
pub(crate) fn list(debugger: &mut Debugger) -> String {
    let mut xml = "<?xml version=\"1.0\"?>\n<threads>\n".to_owned();
    for vcpu in 0..debugger.vcpu_count() {
        let summary = match debugger.state(vcpu) {
            Ok(state) => modes::summary(state),
            Err(error) => error.to_string(),
        };
        let _ = writeln!(
            xml,
            "<thread id=\"p1.{:x}\" core=\"{vcpu}\" name=\"vCPU {vcpu}\">{summary}</thread>",
            vcpu + 1
        );
    }
    xml.push_str("</threads>\n");
    xml
}
