//! Finds the name that a misspelled one most likely means.

/// The least similarity, from 0 to 1, at which a name is suggested.
const SIMILARITY_MIN: f64 = 0.8;

/// The name among `known` that is most similar to `name`, if one is similar enough.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|candidate| (strsim::jaro(name, candidate), candidate))
        .filter(|&(similarity, _)| similarity > SIMILARITY_MIN)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}
