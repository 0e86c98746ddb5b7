//! Dates of the proleptic Gregorian calendar as days since 1970-01-01.

pub(super) const SECONDS_PER_DAY: i64 = 86_400;

/// Day of the week of 1970-01-01, from 0 for Sunday: a Thursday.
const EPOCH_WEEKDAY: i64 = 4;

/// Days since 1970-01-01 of a date.
pub(super) fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    debug_assert!(
        (1..=12).contains(&month) && (1..=31).contains(&day),
        "a date"
    );
    // The year begins in March here, so that the leap day is its last.
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// Year, month and day of a day since 1970-01-01.
pub(super) fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

/// Day of the week of a day since 1970-01-01, from 0 for Sunday.
pub(super) fn weekday(days: i64) -> i64 {
    (days + EPOCH_WEEKDAY).rem_euclid(7)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn weekday_of_a_leap_day_is_correct() {
        // 2024-02-29 was a Thursday.
        assert_eq!(weekday(days_from_civil(2024, 2, 29)), 4);
    }

    proptest! {
        #[test]
        fn civil_date_and_days_are_inverse(days in -800_000_i64..3_000_000) {
            let (year, month, day) = civil_from_days(days);
            prop_assert!((1..=12).contains(&month) && (1..=31).contains(&day));
            prop_assert_eq!(days_from_civil(year, month, day), days);
        }
    }
}
