{{- define "everbatch.name" -}}
{{- printf "%s" (ternary .Release.Name (printf "%s-everbatch" .Release.Name) (contains "everbatch" .Release.Name)) | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "everbatch.selector" -}}
app.kubernetes.io/name: everbatch
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "everbatch.labels" -}}
{{ include "everbatch.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "everbatch.topic" -}}
{{- $names := .Values.model.names -}}
{{- $model := ternary (first $names) (.Values.model.path | default "everbatch") (gt (len $names) 0) -}}
{{- .Values.kvEvents.topic | default (printf "kv@$(POD_IP):9000@%s" $model) }}
{{- end }}
