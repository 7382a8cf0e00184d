//! Compiles the fused operations against libtorch's headers, and lets every binary, test and example of this package find libtorch
//! without `LD_LIBRARY_PATH`; tells build scripts of dependants where it is. Compiles the sandbox's warden to a program, which the library carries with it.

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/model/fused/fused.cpp");
    println!("cargo::rerun-if-changed=src/sandbox/warden");
    compile_warden();
    // Absent when the crate is built without libtorch.
    let Some(lib) = std::env::var_os("DEP_TCH_LIBTORCH_LIB") else { return };
    let lib = std::fs::canonicalize(&lib).unwrap_or_else(|_| PathBuf::from(&lib));
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo::metadata=LIBTORCH_LIB={}", lib.display());
    compile_fused(&lib);
}

fn compile_fused(lib: &Path) {
    let include = lib.parent().map(|root| root.join("include")).unwrap_or_default();
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        // Always optimised: a debug build trains models in its tests. The flags allow sums to be vectorised and keep NaN and infinity.
        .opt_level(3)
        // The threads of libtorch, whose OpenMP library is linked already.
        .flag("-fopenmp")
        .flag("-fno-math-errno")
        .flag("-fno-trapping-math")
        .flag("-fno-signed-zeros")
        .flag("-fassociative-math")
        .warnings(false)
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .file("src/model/fused/fused.cpp")
        .compile("rollflow_fused");
}

/// An empty file where that can't be: the sandbox then says so, and all else works.
fn compile_warden() {
    let Some(out) = std::env::var_os("OUT_DIR").map(|folder| PathBuf::from(folder).join("warden")) else { return };
    let linux = std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux");
    let compiled = linux && {
        let compiler = cc::Build::new().opt_level(2).debug(false).pic(true).cargo_metadata(false).try_get_compiler();
        let files = ["main", "walls", "root"].map(|name| format!("src/sandbox/warden/{name}.c"));
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
