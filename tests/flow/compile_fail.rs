//! Wiring the wrong types together does not compile, and the compiler says what was wired to what.
//!
//! The cases are compiled in a project of their own, with all dependencies once more. Without
//! tensors that takes a minute; with them it would build libtorch's bindings again and show nothing
//! else. The doc test of `Flow::stage` holds the law in every build.

#[test]
fn wrong_wiring_does_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/compile_fail/wrong_item.rs");
    cases.compile_fail("tests/compile_fail/port_used_twice.rs");
    cases.compile_fail("tests/compile_fail/filter_before_reward.rs");
}
