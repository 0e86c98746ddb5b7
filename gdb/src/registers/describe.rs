//! The target description: registers and their types in gdb's XML.

use std::fmt::Write as _;

use super::code_model::CodeModel;
use super::fields::flag_types;
use super::info::feature;
use super::layout::RegisterLayout;

/// The vector types of gdb's own descriptions.
const VECTOR_TYPES: &str = r#"
<vector id="v8bf16" type="bfloat16" count="8"/>
<vector id="v4f" type="ieee_single" count="4"/>
<vector id="v2d" type="ieee_double" count="2"/>
<vector id="v16i8" type="int8" count="16"/>
<vector id="v8i16" type="int16" count="8"/>
<vector id="v4i32" type="int32" count="4"/>
<vector id="v2i64" type="int64" count="2"/>
<union id="vec128">
<field name="v8_bfloat16" type="v8bf16"/>
<field name="v4_float" type="v4f"/>
<field name="v2_double" type="v2d"/>
<field name="v16_int8" type="v16i8"/>
<field name="v8_int16" type="v8i16"/>
<field name="v4_int32" type="v4i32"/>
<field name="v2_int64" type="v2i64"/>
<field name="uint128" type="uint128"/>
</union>"#;

impl RegisterLayout {
    /// The target description in gdb's XML.
    pub fn description(&self) -> String {
        let architecture = match self.model() {
            CodeModel::Code64 => "i386:x86-64",
            CodeModel::Code32 => "i386",
            CodeModel::Code16 => "i8086",
        };
        let mut xml = format!(
            "<?xml version=\"1.0\"?>\n<!DOCTYPE target SYSTEM \"gdb-target.dtd\">\n\
             <target version=\"1.0\">\n<architecture>{architecture}</architecture>\n"
        );
        let mut current = "";
        for (number, register) in self.all().iter().enumerate() {
            if register.feature != current {
                if !current.is_empty() {
                    xml.push_str("</feature>\n");
                }
                current = register.feature;
                let _ = write!(xml, "<feature name=\"{current}\">");
                push_types(&mut xml, current);
                xml.push('\n');
            }
            let _ = writeln!(
                xml,
                "<reg name=\"{}\" bitsize=\"{}\" type=\"{}\" regnum=\"{number}\"{}/>",
                register.name,
                register.bits,
                register.kind,
                match register.group() {
                    Some(group) => format!(" group=\"{group}\" save-restore=\"no\""),
                    None => String::new(),
                },
            );
        }
        xml.push_str("</feature>\n</target>\n");
        xml
    }
}

/// Appends the definitions of the types that a feature's registers have.
fn push_types(xml: &mut String, name: &str) {
    if name == feature::SSE || name == feature::AVX512 {
        xml.push_str(VECTOR_TYPES);
    }
    if name == feature::AVX512 {
        xml.push_str("\n<vector id=\"v2ui128\" type=\"uint128\" count=\"2\"/>");
    }
    for (id, size, fields) in flag_types(name) {
        let _ = write!(xml, "\n<flags id=\"{id}\" size=\"{size}\">");
        for (field, start, end) in *fields {
            let _ = write!(
                xml,
                "<field name=\"{field}\" start=\"{start}\" end=\"{end}\"/>"
            );
        }
        xml.push_str("</flags>");
    }
}

#[cfg(test)]
mod tests {
    use super::super::info::AvailableRegisters;
    use super::*;

    #[test]
    fn every_type_is_builtin_or_defined_before_its_first_use() {
        let builtin = [
            "int", "int32", "int64", "uint16", "uint32", "uint64", "uint128", "i387_ext",
            "code_ptr", "data_ptr",
        ];
        for model in CodeModel::ALL {
            let layout = RegisterLayout::new(model, &AvailableRegisters::all());
            let xml = layout.description();
            for register in layout.all() {
                let defined = xml
                    .find(&format!(" id=\"{}\"", register.kind))
                    .is_some_and(|at| at < xml.find(&format!("\"{}\"", register.name)).unwrap());
                assert!(
                    builtin.contains(&register.kind) || defined,
                    "{}: {}",
                    register.name,
                    register.kind
                );
            }
        }
    }
}
