//! Compiles the warden to a program, which the crate carries with it. An empty file where that can't be:
//! the sandbox then says so, and all else works.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=warden");
    let Some(out) = std::env::var_os("OUT_DIR").map(|folder| PathBuf::from(folder).join("warden")) else { return };
    let linux = std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux");
    let compiled = linux && {
        let compiler = cc::Build::new().opt_level(2).debug(false).pic(true).cargo_metadata(false).try_get_compiler();
        let files = ["main", "walls", "root"].map(|name| format!("warden/{name}.c"));
        compiler.is_ok_and(|compiler| {
            let status = compiler.to_command().args(["-std=gnu11", "-Wall", "-Wextra", "-o"]).arg(&out).args(files).status();
            status.is_ok_and(|status| status.success())
        })
    };
    if !compiled {
        if linux {
            println!("cargo::warning=no C compiler made the sandbox's warden; untrusted code will be refused");
        }
        std::fs::write(&out, []).expect("the folder for build outputs can be written to");
    }
}
